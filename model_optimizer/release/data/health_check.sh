#!/bin/sh
# Is this deployment healthy?
# usage: health_check.sh [--device-only] [--server NAME] [--model NAME] [URL]
#   URL       the server's base address; default: $MODEL_URL, then http://127.0.0.1:8000
#   --server  model-optimizer, vllm, llamacpp, triton (the Inference Server, vllm backend) or openvino (its model server);
#             default: $MODEL_SERVER, then what serves this bundle by itself
#   --model   what the server calls it; default: $MODEL_NAME, then this bundle's name
# A key for the server is read from $MODEL_API_KEY.
# Needs a POSIX shell with grep, sed and awk, and curl or python3.
# Exit: 0 healthy; 2 usage; 10 device; 11 endpoint; 12 output differs from data/sample.json
set -u

DEVICE_KIND='@DEVICE_KIND@'
INSTRUCTION_SETS='@INSTRUCTION_SETS@'
SERVER='@SERVER@'
BUNDLE='@MODEL_NAME@'

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd) || exit 2
sample="$here/data/sample.json"
device_only=no
server=${MODEL_SERVER:-$SERVER}
model=${MODEL_NAME:-$BUNDLE}
url=''

usage() {
  echo "usage: health_check.sh [--device-only] [--server NAME] [--model NAME] [URL]" >&2
  exit 2
}

while [ "$#" -gt 0 ]; do
  case $1 in
    --device-only) device_only=yes ;;
    --server)
      [ "$#" -ge 2 ] || usage
      server=$2
      shift
      ;;
    --model)
      [ "$#" -ge 2 ] || usage
      model=$2
      shift
      ;;
    -*) usage ;;
    *)
      [ -z "$url" ] || usage
      url=$1
      ;;
  esac
  shift
done
url=${url:-${MODEL_URL:-http://127.0.0.1:8000}}
url=${url%/}

# Where a server says that it is ready, where it completes text, and under which name the answer holds the text.
field=text
case $server in
  model-optimizer | vllm | llamacpp) ready=/health complete=/v1/completions ;;
  openvino) ready=/v2/health/ready complete=/v3/completions ;;
  triton) ready=/v2/health/ready complete=/v2/models/$model/generate field=text_output ;;
  *)
    echo "unknown server '$server'; known: model-optimizer, vllm, llamacpp, triton, openvino" >&2
    exit 2
    ;;
esac
case $model in
  *[!A-Za-z0-9._:/-]*)
    echo "the model's name '$model' holds a character that is none of A-Z a-z 0-9 . _ : / -" >&2
    exit 2
    ;;
esac

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

# ask SECONDS URL [BODY]: print what the server answers; fail where that is no success. The key is no argument: others see those.
ask() {
  if command -v curl >/dev/null 2>&1; then
    set -- "$1" "$2" ${3+--data-binary "$3" --header 'Content-Type: application/json'}
    seconds=$1 to=$2
    shift 2
    printf '%s\n' "header = \"Authorization: Bearer ${MODEL_API_KEY:-none}\"" |
      curl --config - --fail --silent --show-error --max-time "$seconds" "$@" "$to"
  elif command -v python3 >/dev/null 2>&1; then
    python3 - "$@" <<'PYTHON'
import os
import sys
import urllib.request

headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ.get("MODEL_API_KEY", "none")}
body = sys.argv[3].encode("utf-8", "surrogateescape") if len(sys.argv) > 3 else None
try:
    with urllib.request.urlopen(urllib.request.Request(sys.argv[2], body, headers), timeout=float(sys.argv[1])) as answer:
        sys.stdout.buffer.write(answer.read())
except (OSError, ValueError) as error:
    sys.exit(str(error))
PYTHON
  else
    echo "neither curl nor python3 is here" >&2
    return 1
  fi
}

check_endpoint() {
  ask 10 "$url$ready" >/dev/null || {
    echo "endpoint: $url$ready does not answer" >&2
    return 1
  }
  echo "endpoint: ok ($url$ready)"
}

# The JSON string that follows the key $1 in the text on standard input, quotes included. Only the last key of that name counts.
json_string() {
  sed -E -n 's/.*"'"$1"'":[[:space:]]*("([^"\\]|\\.)*").*/\1/p'
}

# Two JSON strings say the same: byte by byte, or decoded where python3 is there (one server writes a letter as \u00e9, one as it is).
same_string() {
  [ "$1" = "$2" ] && return 0
  command -v python3 >/dev/null 2>&1 || return 1
  python3 -c 'import json, sys; sys.exit(json.loads(sys.argv[1]) != json.loads(sys.argv[2]))' "$1" "$2" 2>/dev/null
}

# One sample a line; the file is canonical JSON, so that no string holds an unescaped quote or line end.
samples() {
  awk '{ gsub(/\},\{"prompt":/, "}\n{\"prompt\":"); print }' "$sample"
}

check_output() {
  count=0
  while IFS= read -r line; do
    count=$((count + 1))
    prompt=$(printf '%s\n' "$line" | json_string prompt)
    expected=$(printf '%s\n' "$line" | json_string text)
    tokens=$(printf '%s\n' "$line" | sed -n 's/.*"tokens":\[\([0-9,]*\)\].*/\1/p' | awk -F, '{ print NF }')
    if [ -z "$prompt" ] || [ -z "$expected" ] || [ -z "$tokens" ]; then
      echo "output: data/sample.json cannot be read at sample $count" >&2
      return 1
    fi
    if [ "$server" = triton ]; then
      body='{"text_input":'$prompt',"parameters":{"max_tokens":'$tokens',"temperature":0,"exclude_input_in_output":true}}'
    else
      body='{"model":"'$model'","prompt":'$prompt',"max_tokens":'$tokens',"temperature":0}'
    fi
    answer=$(ask 60 "$url$complete" "$body") || {
      echo "output: sample $count was not answered" >&2
      return 1
    }
    seen=$(printf '%s\n' "$(printf '%s' "$answer" | tr '\n' ' ')" | json_string "$field")
    same_string "$seen" "$expected" || {
      echo "output: sample $count gave ${seen:-no text}, expected $expected" >&2
      return 1
    }
  done <<SAMPLES
$(samples)
SAMPLES
  echo "output: ok ($count samples)"
}

check_device || exit 10
[ "$device_only" = yes ] && exit 0
check_endpoint || exit 11
check_output || exit 12
