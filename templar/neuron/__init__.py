"""The live state of one node and the steps of its windows."""
