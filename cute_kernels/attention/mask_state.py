"""The state of a KV block, or of a part of one, under a custom mask: bits that are joined by OR."""

SEEN, HIDDEN = 1, 2  # some token of the tile sees some key of it; some token does not see some key
