"""Steps of flows as Prefect tasks: a name, a retry policy and one call into the domain."""
