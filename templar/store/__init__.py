"""Object stores: one contract, S3 and a directory."""
