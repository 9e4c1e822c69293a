"""The fuzzer on the CPU: it draws the same calls everywhere, finds planted bugs, shrinks them, and replays files."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import wrappers
from bench.cases import attention as cases
from cute_kernels import catalog
from tests.support.emulated import emulation
from tools.fuzz import call as calls
from tools.fuzz import check as checking
from tools.fuzz import machine as machines
from tools.fuzz.__main__ import arguments, main
from tools.fuzz.check import FAILED, REFUSED, RIGHT, Checker, DeviceLost, Verdict, is_fatal
from tools.fuzz.draw import draw
from tools.fuzz.families import FAMILIES
from tools.fuzz.memory import Memory
from tools.fuzz.run import fuzz

CPU = torch.device("cpu")
DECODE = "trtllm_batch_decode_with_kv_cache"
CASE = {"function": "decode", "q_lens": [1, 1, 1], "kv_lens": [40, 7, 300], "sink": 1.0, "window_left": 64}
PLANTED = calls.Call("decode", DECODE, 5, case=CASE, extra={"on_device": True})
NUMBERS = {
    "decode": 14,
    "prefill": 7,
    "layers": 3,
    "chosen": 20,
    "topk": 40,
    "cache": 25,
    "latent": 40,
    "gather": 30,
    "mla": 30,
    "indexer": 25,
    "merge": 40,
    "small": 40,
}


@pytest.fixture
def checker():
    return Checker(CPU)


def test_a_call_is_the_same_wherever_it_is_drawn():
    for family in FAMILIES:
        for index in range(40):
            first = draw(3, index, (family,))
            again = draw(3, index, (family,))
            assert str(first) == str(again) and first.family == family
            assert calls.from_json(json.loads(str(first))) == first
    assert len({str(draw(3, index)) for index in range(200)}) == 200
    assert str(draw(3, 0)) != str(draw(4, 0))


def test_every_public_function_is_drawn():
    drawn = {draw(0, index).function for index in range(3000)}
    drawn |= {"fast_decode_plan", "bind"}  # options of other functions
    drawn |= {"explain", "single_prefill_with_kv_cache_return_lse", "dsa_indexer_topk_workspace_size"}
    drawn |= {"single_decode_with_kv_cache"}  # the call of flash_attn_with_kvcache with one query and no table
    missing = {name for name in wrappers.__all__ if name[0].islower()} - drawn
    assert not missing


def test_values_of_every_magnitude_and_windows_at_every_edge_are_drawn():
    cases = [draw(0, index, (family,)).case for family in ("prefill", "decode") for index in range(1500)]
    units = {math.log2(case["q_unit"]) for case in cases if "q_unit" in case}
    outputs = {math.log2(case["out_scale"]) for case in cases if case.get("out_scale", 0.3) not in (0.3, 2.0, 30.0)}
    assert {-30, 30, *range(-8, 7)} - {0} <= units and min(outputs) < -20 < 20 < max(outputs)
    begins = {
        (n - q - case["window_left"]) % 128 for case in cases if case.get("window_left", -1) > 0
        for q, n in zip(case.get("q_lens", (8,)), case.get("kv_lens", (8,)))
    }  # fmt: skip
    assert {127, 0, 1} <= begins


def test_no_plan_is_captured():
    """A call of the class of latent attention begins with its plan."""
    drawn = (draw(0, index, ("mla",)) for index in range(600))
    assert {call.mode for call in drawn if call.function == "BatchMLAPagedAttentionWrapper"} == {"eager", "threads"}


@pytest.mark.parametrize("family", FAMILIES)
def test_functions_are_right_on_the_cpu(checker, family):
    """Some calls are refused, because the CPU path reads index tensors."""
    for index in range(NUMBERS[family]):
        call = draw(2, index, (family,), small=True)
        verdict = checker.check(call)
        refusal = verdict.word == REFUSED and call.extra.get("hostile")
        assert verdict.word in (RIGHT, checking.SKIPPED) or refusal, (index, verdict, str(call))


@pytest.mark.parametrize("function", [DECODE, "trtllm_batch_context_with_kv_cache", "xqa"])
def test_the_path_of_the_gpu_with_emulated_kernels(checker, function):
    """Kernels that compute in torch clamp what they read, so no hostile call is refused."""
    case = {**CASE, "function": {DECODE: "decode", "xqa": "xqa"}.get(function, "context"), "layout": "NHD"}
    with emulation() as fake:
        for hostile in ("", "lengths", "pages"):
            call = calls.Call("decode", function, 5, "eager", "shape", case, {"hostile": hostile} if hostile else {})
            if function == "xqa":
                call = replace(call, case=case | {"lse": False})
            verdict = checker.check(call)
            assert verdict.word == RIGHT, (verdict, str(call))
        assert fake.launches


# ---- planted bugs


def planted(monkeypatch, after):
    """Let `after` spoil the arguments and the result of the decode function."""
    function, arguments = cases.FUNCTIONS["decode"]

    def wrong(**given):
        found = function(**given)
        return after(given, found)

    monkeypatch.setitem(cases.FUNCTIONS, "decode", (wrong, arguments))


def beyond(given, found):
    """Write the element behind the output."""
    out = given["out"]
    out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(1.0)
    return found


def spoiled_input(given, found):
    given["query"].view(-1)[3] += 1
    return found


def wrong_value(given, found):
    if int(given["seq_lens"].max()) > 20:
        given["out"].view(-1)[-1] += 0.5
    return found


def wrong_lse(given, found):
    given["lse"][0, 0] += 0.1
    return found


BUGS = {
    "beyond the output": (beyond, "outside the outputs changed"),
    "an input": (spoiled_input, "outside the outputs changed"),
    "a value": (wrong_value, "out: 1 of"),
    "the LSE": (wrong_lse, "lse: 1 of"),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_found(checker, monkeypatch, name):
    assert checker.check(PLANTED).word == RIGHT
    bug, message = BUGS[name]
    planted(monkeypatch, bug)
    verdict = checker.check(PLANTED)
    assert verdict.word == FAILED and message in verdict.reason, verdict


def test_other_bits_of_a_second_call_are_found(checker, monkeypatch):
    made = []

    def flips(given, found):
        made.append(0)
        given["out"].view(torch.int16).view(-1)[0] ^= len(made) % 2
        return found

    planted(monkeypatch, flips)
    verdict = checker.check(PLANTED)
    assert verdict.word == FAILED and verdict.reason.startswith("a second call: "), verdict


def test_a_refusal_must_have_written_nothing(checker, monkeypatch):
    def refuses(given, found):
        raise ValueError("seq_lens: no")

    planted(monkeypatch, refuses)
    verdict = checker.check(PLANTED)
    assert verdict.word == FAILED and "refused (seq_lens: no), but" in verdict.reason
    monkeypatch.setitem(cases.FUNCTIONS, "decode", (lambda **given: refuses(given, None), cases.decode_arguments))
    assert checker.check(PLANTED) == Verdict(REFUSED, "ValueError: seq_lens: no")


def test_a_wrong_selection_is_found(checker, monkeypatch):
    def wrong(**given):
        values, indices = wrappers.flashinfer.topk.top_k(**given)
        indices[-1, -1] = indices[-1, 0]
        return values, indices

    monkeypatch.setattr(wrappers, "top_k", wrong)
    call = calls.Call("topk", "top_k", 1, case={"rows": 4, "width": 30})
    assert checker.check(call).reason.startswith("indices: 1 of")


def test_a_wrong_byte_of_a_cache_is_found(checker, monkeypatch):
    def wrong(**given):
        wrappers.own.append_qkv.append_qkv(**given)
        given["cache"].kv.view(torch.int16)[0, 0, 0, 0, 0] ^= 1

    call = calls.Call("cache", "append_qkv", 1, case={"tokens": 4})
    assert checker.check(call).word == RIGHT
    monkeypatch.setattr(wrappers, "append_qkv", wrong)
    assert "memory after the call" in checker.check(call).reason


# ---- the command


def test_a_failing_call_is_kept_smaller_and_replays(monkeypatch, tmp_path, capsys):
    large = CASE | {"soft_cap": 9.0, "heads_q": 8, "heads_kv": 2}
    monkeypatch.setattr("tools.fuzz.run.draw", lambda *_: replace(PLANTED, mode="graph", choice="function", case=large))
    planted(monkeypatch, wrong_value)
    assert main(["--device", "cpu", "--keep", str(tmp_path), "--shrink", "60", "--calls", "1"]) == 1
    out = capsys.readouterr().out
    assert "| all | 1 | 0 | 0 | 0 | 0 | 1 |" in out and "1 calls, 1 failed; seeds 0, commit " in out
    files = sorted(map(str, tmp_path.glob("*.json")))
    assert len(files) == 2 and not list(tmp_path.glob("current*"))
    whole, small = sorted((calls.load(Path(file)) for file in files), key=lambda call: -len(str(call)))
    assert whole.case == large and small.mode == "eager" and small.choice == "shape" and not small.extra
    assert {"sink", "window_left", "soft_cap"}.isdisjoint(small.case) and len(small.case["q_lens"]) == 1, small.case
    assert 20 < small.case["kv_lens"][0] <= 40 and (small.case["heads_q"], small.case["heads_kv"]) == (1, 1)
    assert main(["--device", "cpu", "--replay", *files]) == 1
    monkeypatch.undo()
    assert main(["--device", "cpu", "--replay", *files]) == 0
    with pytest.raises(SystemExit, match="--family: none, must be of decode"):
        main(["--family", "none"])


def test_a_lost_device_ends_the_process_and_leaves_the_call(tmp_path):
    def lost(call):
        raise DeviceLost("CUDA error: an illegal memory access was encountered")

    tally = fuzz(
        arguments().parse_args(["--keep", str(tmp_path), "--calls", "5", "--seed", "7", "--device", "cpu"]), lost
    )
    assert tally.count() == tally.count(FAILED) == 1 and tally.files == [str(tmp_path / "lost-7-0.json")]
    assert calls.load(tmp_path / "lost-7-0.json") == draw(7, 0, small=True)
    assert is_fatal(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_fatal(ValueError("seq_lens: 3"))


def test_memory_beside_a_tensor_is_guarded():
    """Also between two rows."""
    memory, t = Memory(CPU), torch.arange(6.0).view(2, 3)[:, :2]
    tree = memory.place({"a": t, "out": torch.zeros(4)}, lambda tree: [tree["out"]])
    image = memory.image({"a": t, "out": torch.zeros(4)})
    memory.restore(image)
    assert torch.equal(tree["a"], t) and tree["a"].stride() == t.stride() and not memory.changed(image)
    tree["out"].fill_(1.0)
    assert not memory.changed(image) and memory.changed(image, everything=True)
    tree["a"].as_strided((1,), (1,), tree["a"].storage_offset() + 2).fill_(9.0)
    assert memory.changed(image)


def test_only_kernels_of_a_bundle_are_run():
    op, spec = catalog.shipped("sm_90a")[0]
    with pytest.raises(machines.OnDemand, match="d96"):
        machines.Shipped().kernel(op, replace(spec, head_dim_qk=96, head_dim_vo=96), "sm_90a")
