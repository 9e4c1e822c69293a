"""Extension points of other libraries, served by the public functions. A module imports the library that its name
begins with; `plugins`, which engines load, imports none before it is asked to, and `support` none at all."""
