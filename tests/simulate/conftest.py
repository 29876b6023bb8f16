from dataclasses import asdict


def without_times(report):
    return {name: value for name, value in asdict(report).items() if name not in ("seconds", "windows_per_second")}
