# SPDX-License-Identifier: Apache-2.0
"""python -m dsopt: prints a description of the library."""

import json

from . import build_info

print(json.dumps(build_info(), indent=2))
