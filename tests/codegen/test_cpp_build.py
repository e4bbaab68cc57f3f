"""Finding a compiler, building, and keeping what was built."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.loops.compiling import compile_function, same
from undertow.codegen import cpp_build, kernels, kernels_dynamic, kernels_unit
from undertow.codegen.libraries import Room
from undertow.notices import counts

UNIT = 'extern "C" i64 answer(void) { return 42; }\n'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpp_build, "_candidates", list)
    cpp_build.find_compiler.cache_clear()
    yield
    cpp_build.find_compiler.cache_clear()


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    done = []
    original = cpp_build._compile

    def counted(*args):  # type: ignore[no-untyped-def]
        done.append(1)
        original(*args)

    monkeypatch.setattr(cpp_build, "_compile", counted)
    return done


def test_a_unit_is_built_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpp_build.find_compiler()  # which builds something, too
    done = count_compilations(monkeypatch)
    for _ in range(2):
        assert cpp_build.build(UNIT).answer() == 42
    assert len(done) == 1
    assert not list(cache.rglob("build-*"))


def test_a_file_that_was_changed_is_built_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done = count_compilations(monkeypatch)
    counts.pop("kernel refused", None)
    path = Path(cpp_build.build_whole(cpp_build.prelude() + UNIT))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with caplog.at_level(logging.WARNING):
        assert Path(cpp_build.build_whole(cpp_build.prelude() + UNIT)) == path
    assert len(done) == 2
    assert "not what was built" in caplog.text
    assert counts["kernel refused"] == 1


ONE, TWO = (f'extern "C" int number(void) {{ return {n}; }}\n' for n in (1, 2))


def put_in_place(path: Path, other: Path, how: str) -> None:
    """The library of another unit, which is sound, under the name of this one."""
    for suffix in (".so", ".sha256"):
        mine, theirs = path.with_suffix(suffix), other.with_suffix(suffix)
        mine.unlink()
        if how == "links":
            mine.symlink_to(theirs)
        elif how == "hard links":
            mine.hardlink_to(theirs)
        else:
            shutil.copy2(theirs, mine)
        if how == "another user's" or (how == "another user's sum" and suffix == ".sha256"):
            os.chown(mine, 12345, 12345)
        if how == "for all to write":
            mine.chmod(0o777)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("copies", "is not what was built"),
        ("hard links", "is not what was built"),
        ("links", "is a symbolic link"),
        ("for all to write", "can be written by other users"),
        ("another user's", "belongs to another user"),
        ("another user's sum", "belongs to another user"),
    ],
)
def test_what_is_not_ours_or_of_another_unit_is_never_loaded(
    how: str, why: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if "another user" in how and os.geteuid() != 0:
        pytest.skip("files cannot be given away")
    counts.pop("kernel refused", None)
    other = Path(cpp_build.build_whole(TWO))
    for _ in range(2):
        put_in_place(Path(cpp_build.build_whole(ONE)), other, how)
        assert cpp_build.load_whole(ONE).number() == 1
    assert counts["kernel refused"] == 2
    (record,) = [r.getMessage() for r in caplog.records if "is not used" in r.getMessage()]
    assert why in record
    assert cpp_build.build_whole(ONE).startswith(str(cache))  # it was put there again


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("a link", "is a symbolic link"),
        ("for a group to write", "can be written by other users"),
        ("another user's", "belongs to another user"),
    ],
)
def test_nothing_is_loaded_from_a_folder_that_others_may_have_written(
    how: str, why: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "another user's" and os.geteuid() != 0:
        pytest.skip("files cannot be given away")
    cpp_build.find_compiler()
    counts.pop("kernels not kept", None)
    place = Path(cpp_build.build_whole(ONE)).parent
    assert place.is_relative_to(cache)
    if how == "a link":
        place.rename(cache / "real")
        place.symlink_to(cache / "real")
    elif how == "another user's":
        os.chown(place, 12345, 12345)
    else:
        place.chmod(0o770)
    for _ in range(2):
        assert not cpp_build.build_whole(ONE).startswith(str(cache))
        assert cpp_build.load_whole(ONE).number() == 1
    assert counts["kernels not kept"] == 4
    (record,) = [r.getMessage() for r in caplog.records if "cannot be used" in r.getMessage()]
    assert why in record


def test_a_folder_that_takes_the_place_of_the_one_looked_at_is_not_loaded_from(
    cache: Path,
) -> None:
    """Who may write to the folder above can rename this one at any moment."""
    other = Path(cpp_build.build_whole(TWO))
    name = Path(cpp_build.build_whole(ONE)).name

    def loader(path: str) -> ctypes.CDLL:
        other.parent.rename(cache / "away")
        other.parent.mkdir()
        shutil.copy2(cache / "away" / other.name, other.parent / name)
        return ctypes.CDLL(path)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("folders cannot be reached by their descriptor")
    assert cpp_build._load(cpp_build.find_compiler(), ONE, loader=loader).number() == 1


def test_the_cache_is_used_whatever_the_umask_and_when_it_was_emptied(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpp_build.find_compiler()
    done = count_compilations(monkeypatch)
    unit = f"// {cache}\n{ONE}"
    before = os.umask(0)
    try:
        for emptied in range(2):
            for _ in range(2):
                assert cpp_build.load_whole(unit).number() == 1
            assert len(done) == emptied + 1
            shutil.rmtree(cache / "kernels")
    finally:
        os.umask(before)


def test_what_the_compiler_refuses_is_an_error_with_its_words(cache: Path) -> None:
    with pytest.raises(cpp_build.BuildError, match="nonsense"):
        cpp_build.build("nonsense\n")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (None, "No such file"),
        ("echo oh no >&2; exit 1", "oh no"),
        ("exit 0", "wrote no library"),
        ('echo junk > "$last"', "cannot be loaded"),
    ],
)
def test_a_named_compiler_that_does_not_work_is_passed_over_with_a_word(
    script: str | None,
    why: str,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = cache / "my-c++"
    if script is not None:
        asked = 'for last; do :; done; [ "$last" = --version ] && exit 0'
        own.write_text(f"#!/bin/sh\n{asked}\n{script}\n")
        own.chmod(0o755)
    monkeypatch.setenv("CXX", f"{own} -x")
    assert cpp_build._candidates()[0] == (str(own), "-x")
    cpp_build.find_compiler.cache_clear()
    counts.pop("compiler passed over", None)
    try:
        assert cpp_build.find_compiler().command != (str(own), "-x")
        assert cpp_build.build(UNIT).answer() == 42
    finally:
        cpp_build.find_compiler.cache_clear()
    (record,) = [r.getMessage() for r in caplog.records if "compiles kernels" in r.getMessage()]
    assert why in record


def test_what_cannot_be_loaded_from_the_cache_is_built_elsewhere(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def loader(path: str) -> ctypes.CDLL:  # as on a file system from which nothing is executed
        if os.path.realpath(path).startswith(str(cache)):
            raise OSError("failed to map segment")
        return ctypes.CDLL(path)

    counts.pop("kernels not kept", None)
    compiler = cpp_build.find_compiler()
    for _ in range(2):
        assert cpp_build._load(compiler, UNIT.replace("i64", "long"), loader=loader).answer() == 42
    assert caplog.text.count("failed to map segment") == 1
    assert counts["kernels not kept"] == 2


def test_a_folder_that_is_no_cache_is_gone_when_the_process_ends(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    script = f"from undertow.codegen.cpp_build import build\nassert build({UNIT!r}).answer() == 42"
    environment = {**os.environ, "UNDERTOW_CACHE": str(tmp_path / "file"), "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["g++", "clang++", "ziglang"])
def test_every_compiler_of_the_chain_builds_kernels_that_run(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    mine = [command for command in cpp_build._candidates() if name in " ".join(command)]
    if not mine:
        pytest.skip(f"{name} is not installed")
    monkeypatch.setattr(cpp_build, "_candidates", lambda: mine)
    cpp_build.find_compiler.cache_clear()
    try:
        x = torch.randn(40, 300)

        def function(x):  # type: ignore[no-untyped-def]
            return [x.softmax(-1), x.abs().sum(), x.tanh().amax(0), x.bfloat16().exp()]

        same(compile_function(function, x)(x), function(x))
        assert cpp_build.find_compiler().command == mine[0]
    finally:
        cpp_build.find_compiler.cache_clear()


def test_without_a_compiler_graphs_run_as_aten_calls_and_the_log_says_so_once(
    no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(3)
    gm = make_fx(lambda x: [x + 1], tracing_mode="fake")(x)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            same(kernels_dynamic.compile_any(gm)(x), [x + 1])
    assert caplog.text.count("install g++ or clang++") == 1


def test_generated_code_has_no_includes_and_asks_for_no_fast_math() -> None:
    assert "#include" not in cpp_build.prelude()
    assert not any("fast-math" in flag or "finite" in flag for flag in cpp_build.FLAGS)


@pytest.mark.slow
def test_many_processes_may_build_the_same_unit_at_once(cache: Path) -> None:
    script = (
        f"from undertow.codegen.cpp_build import build\nassert build({UNIT!r}).answer() == 42\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in running] == [0, 0, 0]


def test_nan_infinities_and_signed_zeros_are_as_in_eager() -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 88.9, -104.5])

    def function(x):  # type: ignore[no-untyped-def]
        return [
            x.exp(), x.log(), x.tanh(), x.erf(), x.sigmoid(), x.sqrt(), x.relu(), x.sin(), x.cos(),
            x.log1p(), x.expm1(), x.amax(), x.amin(), x.sum(), x.neg(), x.clamp(-1, 1), 1 / x,
            x.round(), x.sign(), x.isnan(), x == x,
        ]  # fmt: skip

    got, want = compile_function(function, x)(x), function(x)
    same(got, want)
    for a, b in zip(got, want, strict=True):
        if a.is_floating_point():
            zeros = b == 0
            assert torch.equal(a[zeros].signbit(), b[zeros].signbit())


MATH = ["exp", "log", "tanh", "erf", "sigmoid", "sin", "cos", "expm1", "log1p", "exp2", "log2"]


@pytest.mark.parametrize("name", MATH)
def test_math_is_within_two_units_in_the_last_place(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(20000, generator=random) * s for s in (0.01, 1, 10, 80)])
    if name in ("log", "log2", "log1p"):
        x = x.abs()
    function = getattr(torch, name)
    (got,) = compile_function(lambda x: [function(x)], x)(x)
    want = function(x.double())
    eager = function(x).double()
    good = want.abs() > 1e-37
    unit = torch.ldexp(torch.ones(()), torch.frexp(want.float())[1] - 24)
    exact = (got.double() - want).abs() / unit
    error = torch.minimum(exact, (got.double() - eager).abs() / unit)[good & got.isfinite()]
    assert error.max() <= 2


def two_kernels(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Kernels of different structure, one with partial results and one that checks its indices."""
    return x.exp(), (x * 2).sum(0), torch.softmax(x, 1), x[rows] + 1


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_unit, "PART_CHARS", 100)
    monkeypatch.setattr(kernels, "compilers_at_once", lambda: 3)


def test_a_large_unit_is_compiled_in_parts_at_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, in_parts: None
) -> None:
    calls = []
    original = cpp_build._run

    def counted(command: list[str]) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        return original(command)

    monkeypatch.setattr(cpp_build, "_run", counted)
    x, rows = torch.randn(200, 96), torch.tensor([3, 0, 7])
    compiled = compile_function(two_kernels, x, rows)
    same(compiled(x, rows), list(two_kernels(x, rows)), rtol=1e-5, atol=1e-4)
    with pytest.raises(IndexError):  # what a kernel of another part found is seen
        compiled(x, torch.tensor([3, 0, 700]))
    same(compiled(x, rows), list(two_kernels(x, rows)), rtol=1e-5, atol=1e-4)
    assert sum("-c" in command for command in calls) == 3
    assert sum("-shared" in command for command in calls) == 1
    assert not list(cache.rglob("build-*"))
    assert len(list(cache.rglob("*.so"))) == 1


def test_in_parts_or_not_a_unit_is_the_same_in_the_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = count_compilations(monkeypatch)
    x, rows = torch.randn(200, 96), torch.tensor([3, 0, 7])
    compile_function(two_kernels, x, rows)
    monkeypatch.setattr(kernels_unit, "PART_CHARS", 100)
    monkeypatch.setattr(kernels, "compilers_at_once", lambda: 3)
    compile_function(two_kernels, x, rows)
    assert len(done) == 1


def test_a_part_that_does_not_compile_is_told_and_leaves_nothing(cache: Path) -> None:
    with pytest.raises(cpp_build.BuildError, match="refused the generated code"):
        cpp_build.build("whole", lambda: ["i64 fine;", "not C++"])
    assert not list(cache.rglob("build-*"))
    assert not list(cache.rglob("*.so"))


def test_ranks_on_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_build, "cores", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cpp_build.compilers_at_once() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert cpp_build.compilers_at_once() == 1


def test_a_unit_that_is_not_there_leaves_nothing_to_collect(cache: Path) -> None:
    """A cycle would hold the frames of whoever compiles, and what these get to hold."""
    room = Room.at(cache / "kernels")
    gc.collect()
    gc.disable()
    try:
        assert not room.has("0" * 40, "unit")
        assert gc.collect() == 0
    finally:
        gc.enable()
