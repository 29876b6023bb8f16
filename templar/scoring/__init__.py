"""From payloads to weights: measurement, ratings, slashing, evidence."""
