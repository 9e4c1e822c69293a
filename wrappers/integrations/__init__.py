"""Extension points of other libraries, served by the public functions. A module imports the library it is named for."""
