"""A network with attackers in it, in real time, on a real S3 endpoint, told by the flows."""
