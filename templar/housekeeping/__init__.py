"""Clean-up of buckets and disks, access checks, checkpoints, shard rotation and metrics."""
