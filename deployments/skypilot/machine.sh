#!/bin/sh
# One neuron on a machine of a cloud: the task files of this folder call this script (docs/clouds.md).
#
#   machine.sh setup       install the project
#   machine.sh run ROLE    restore the neuron from its bucket if its folder is not here, and run it until a signal
#
# Its variables are those of .env.example, and these: TEMPLAR_HOTKEY, the hotkey's file in base64; NEURON_NAME; and
# PREFECT_PORT, of a Prefect server on loopback, unless PREFECT_API_URL names one.
set -eu
cd "$(dirname "$0")/../.."

if [ "${1:-}" = setup ]; then
    command -v make >/dev/null || ./deployments/debian.sh make
    exec make .venv
fi

# 1. What it was given. The role of .env must be that of the task file, whose machine was chosen for it.
if [ "${1:-}" != run ] || [ "${TEMPLAR_ROLE:-}" != "${2:-}" ]; then
    echo "machine.sh $*: TEMPLAR_ROLE is '${TEMPLAR_ROLE:-}': launch the task file of that role, or correct .env" >&2
    exit 2
fi
: "${WALLET_NAME:?set it in .env}" "${WALLET_HOTKEY:?set it in .env}"
: "${TEMPLAR_HOTKEY:?set it to the file of the hotkey in base64, and launch with --secret TEMPLAR_HOTKEY}"

# 2. The hotkey's file, for this user alone; the neuron's processes do not inherit its text.
umask 077
export WALLET_PATH="$HOME/.bittensor/wallets" TEMPLAR_HOME="$HOME/.templar/neuron"
mkdir -p "$WALLET_PATH/$WALLET_NAME/hotkeys"
printf %s "$TEMPLAR_HOTKEY" | base64 -d >"$WALLET_PATH/$WALLET_NAME/hotkeys/$WALLET_HOTKEY"
unset TEMPLAR_HOTKEY

# 3. The neuron's folder, then the neuron. `exec`: a signal to this process ends the neuron in good order.
name="${NEURON_NAME:-default}"
.venv/bin/python -m deployments neuron restore --from-bucket --unattended --name "$name"
if [ -n "${PREFECT_API_URL:-}" ]; then set --; else set -- --prefect-port "${PREFECT_PORT:-4200}"; fi
exec .venv/bin/python -m deployments neuron start --name "$name" "$@"
