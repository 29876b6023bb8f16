"""A flow module that ends the interpreter when it is imported."""

raise SystemExit("this module cannot be imported")
