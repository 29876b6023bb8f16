#!/bin/sh
# Install the Debian packages that a fresh machine may lack, and those that are named as arguments. Without root or apt
# it says so and goes on: only the first one is ever necessary, the second is more text for the embedded dataset.
# A service that a package brings is not started, now or with the machine.
set -u

missing=""
"${PYTHON:-python3.11}" -c "import ensurepip, venv" 2>/dev/null || missing="$missing python3.11 python3.11-venv"
[ -d /usr/share/doc/python3.11/html/_sources ] || missing="$missing python3.11-doc"
for package in "$@"; do
    dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"
done
[ -z "$missing" ] && exit 0

if ! command -v apt-get >/dev/null; then
    echo "not a Debian machine, going on without:$missing" >&2
    exit 0
fi
run=""
if [ "$(id -u)" -ne 0 ]; then
    if ! sudo -n true 2>/dev/null; then
        echo "not root, going on without:$missing (install with: sudo apt-get install$missing)" >&2
        exit 0
    fi
    run="sudo"
fi
# Debian's scripts start no service while this file is there and exits with 101.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap '$run rm -f "$policy"' EXIT
    trap 'exit 130' INT TERM
    printf '#!/bin/sh\nexit 101\n' | $run tee "$policy" >/dev/null && $run chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # a list of words
$run apt-get install -y -qq --no-install-recommends $missing >/dev/null 2>&1 ||
    { $run apt-get update -qq >/dev/null 2>&1 && $run apt-get install -y -qq --no-install-recommends $missing >/dev/null 2>&1; } ||
    echo "could not install:$missing; going on without" >&2
for package in "$@"; do
    case "$missing " in *" $package "*) $run systemctl disable --quiet "$package" >/dev/null 2>&1 ;; esac
done
exit 0
