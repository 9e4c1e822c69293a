"""Extension points of other libraries, implemented by the public functions.

A module imports the library that its name begins with. `plugins`, which engines load, imports none before it is asked
to; `support` imports none at all.
"""
