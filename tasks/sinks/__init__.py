"""Sinks for a neuron's figures and log lines besides its folder: Prometheus, InfluxDB, Loki. All are off by default."""
