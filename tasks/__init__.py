"""One step of a flow per file: retry policy, name, and one call into the domain."""
