#!/bin/sh
# Is this deployment healthy?  usage: health_check.sh [--device-only] [URL]
# URL is the server's base address; default: $MODEL_URL, then http://127.0.0.1:8000
# Exit: 0 healthy; 2 usage; 10 device; 11 endpoint; 12 output differs from data/sample.json
set -u

DEVICE_KIND='@DEVICE_KIND@'
INSTRUCTION_SETS='@INSTRUCTION_SETS@'
HEALTH_PATH='@HEALTH_PATH@'
MODEL_NAME='@MODEL_NAME@'

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd) || exit 2
sample="$here/data/sample.json"
device_only=no
if [ "${1:-}" = "--device-only" ]; then
  device_only=yes
  shift
fi
if [ "$#" -gt 1 ]; then
  echo "usage: health_check.sh [--device-only] [URL]" >&2
  exit 2
fi
url=${1:-${MODEL_URL:-http://127.0.0.1:8000}}
url=${url%/}

check_device() {
  if [ "$DEVICE_KIND" = "cuda" ]; then
    nvidia-smi -L >/dev/null 2>&1 || {
      echo "device: no NVIDIA GPU answers to nvidia-smi" >&2
      return 1
    }
  elif [ -r /proc/cpuinfo ]; then
    for flag in $INSTRUCTION_SETS; do
      grep -q -w -- "$flag" /proc/cpuinfo || {
        echo "device: this CPU lacks $flag, which the release was measured with" >&2
        return 1
      }
    done
  fi
  echo "device: ok ($DEVICE_KIND)"
}

check_endpoint() {
  curl --fail --silent --show-error --max-time 10 --output /dev/null "$url$HEALTH_PATH" || {
    echo "endpoint: $url$HEALTH_PATH does not answer" >&2
    return 1
  }
  echo "endpoint: ok ($url$HEALTH_PATH)"
}

check_output() {
  MODEL_NAME="$MODEL_NAME" python3 - "$sample" "$url/v1/completions" <<'PYTHON'
import json
import os
import sys
import urllib.request

with open(sys.argv[1], encoding="utf-8") as stream:
    samples = json.load(stream)["samples"]
for number, sample in enumerate(samples, start=1):
    body = {"model": os.environ["MODEL_NAME"], "prompt": sample["prompt"], "max_tokens": len(sample["tokens"]), "temperature": 0}
    request = urllib.request.Request(
        sys.argv[2], json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = json.load(answer)["choices"][0]["text"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        sys.exit(f"output: sample {number} was not answered: {error}")
    if text != sample["text"]:
        sys.exit(f"output: sample {number} gave {text!r}, expected {sample['text']!r}")
print(f"output: ok ({len(samples)} samples)")
PYTHON
}

check_device || exit 10
[ "$device_only" = yes ] && exit 0
check_endpoint || exit 11
check_output || exit 12
