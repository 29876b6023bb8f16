"""Networks with attackers in them, on simulated time or on a real S3 endpoint, and a verdict on each attack."""
