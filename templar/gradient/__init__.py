"""From a tensor to the bytes that a miner publishes, and from everybody's bytes to one outer step."""
