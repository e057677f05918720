"""Does a URL answer with 200? For health checks in an image without curl: `python answers.py URL`."""

import sys
import urllib.request

with urllib.request.urlopen(sys.argv[1], timeout=4) as answer:
    sys.exit(answer.status != 200)
