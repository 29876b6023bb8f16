#!/bin/sh
# Install packages under constraints.txt: `install.sh PYTHON WORDS...`, where the words are those that follow `pip install`.
# uv does it, because it is several times as fast, where pip can install uv; else pip does. torch comes by pip first:
# pip finds the build without CUDA that a machine may keep, and uv leaves an installed torch alone. uv does not read the
# configuration of pip, so indexes, links and constraints are passed on.
set -eu

python="$1"
shift
pip="$python -m pip install --quiet --no-compile --constraint constraints.txt"
$pip torch
if ! $pip uv 2>/dev/null; then
    exec $pip "$@"
fi

setting() { # the value of one of pip's options; a variable comes before a file
    "$python" -m pip config list 2>/dev/null | sed -n "s/^[^=]*\.$1='\(.*\)'\$/\1/p" | head -n 1
}
options=""
for each in $(setting index-url); do options="$options --default-index $each"; done
for each in $(setting extra-index-url); do options="$options --index $each"; done
for each in $(setting find-links); do options="$options --find-links $each"; done
for each in $(setting constraint); do options="$options --constraint $each"; done
certificates="$(setting cert)"
[ -z "$certificates" ] || export SSL_CERT_FILE="$certificates"
# shellcheck disable=SC2086 # lists of words
exec "$python" -m uv pip install --quiet --python "$python" --index-strategy unsafe-best-match \
    --constraint constraints.txt $options "$@"
