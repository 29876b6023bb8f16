"""Sinks for a neuron's figures, traces and logs: Prometheus, InfluxDB, Loki, OpenTelemetry, W&B; off by default."""
