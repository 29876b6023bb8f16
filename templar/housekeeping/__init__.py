"""Clean-up of buckets and disks, access checks, checkpoints and shard rotation."""
