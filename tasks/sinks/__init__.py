"""Where a neuron's figures and log lines go besides its folder: Prometheus, InfluxDB, Loki. All are off by default."""
