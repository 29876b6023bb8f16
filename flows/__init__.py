"""The flows that an operator starts and schedules, one per file."""

from prefect.runtime import flow_run


def window_run_name() -> str:
    """`{neuron} window {window}`, for the list of runs."""
    parameters = flow_run.parameters
    window = parameters.get("window")
    return f"{parameters.get('neuron', 'default')} window {'next' if window is None else window}"
