#!/usr/bin/env bash
# Every check that needs a CUDA card, on one card, in under 5 minutes: bash tests/gpu/run.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -m pytest tests/gpu -q --timeout 240 "$@"
