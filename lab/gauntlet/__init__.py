"""A network with attackers in it on a real S3 endpoint, in real time, and a verdict on each attack."""
