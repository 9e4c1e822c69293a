"""States of attention merged in one launch: what the functions of `cascade` share."""
