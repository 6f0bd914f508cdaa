"""Counting of bundles, on a schedule small enough to count by hand."""

import re

import pytest

from benchmarks import bundles, scalar_program

# A grid of 4 steps; the first sets up a sum. Each runs an inner loop over 0, 2, 4, 6, whose counter
# goes through memory. Two bundles after a branch are still issued.
SCHEDULE = """\
= control target key start
LB: loop body
= control target key end

     0   :  { %s10_s0 = smov.u32 0  ;;  %5 = vsyncpa [#allocation3], 0 } /* End region 1 */
   0x1 LB: > { %s18_s3 = sadd.s32 4294967295, %s11_s0  ;;  %s11_s0 = sphi %s10_s0, %s19_s0 }
   0x2   : > { %p12_p0 = scmp.ge.s32.totalorder %s18_s3, 0  ;;  %6 = dma.hbm_to_vmem %s3_s9 /*
base_bounds: (2, 10)
*/ }
   0x3   : > { %7 = sbr.rel (%p12_p0) target bundleno = 8 (0x8), region = 3 }
   0x4   :  {}
   0x5   :  {} /* End region 5 */
   0x6   : > { %8 = vst [vmem:[#allocation5]] /*vst_source=*/%v2_v1 } /* Start region 3 */
   0x7   : > { %9 = vst [vmem:[#allocation5 + $0x8]] /*vst_source=*/%v2_v1 } /* End region 3 */
   0x8 PF: > { %s13_s1 = smov.u32 0 /* copy for cssa */ }
   0x9   :  {}
   0xa LB: >> { %s14_s1 = sphi %s13_s1, %s16_s1  ;;  %v3_v2 = vadd.f32 %v1_v0, %v1_v0 }
   0xb   : >> { %20 = sst [smem:[#allocation7_spill]] %s14_s1 }
   0xc   : >> { %s15_s2 = sld [smem:[#allocation7_spill]] }
   0xd   : >> { %s16_s1 = sadd.s32 2, %s15_s2 }
   0xe   : >> { %p17_p1 = scmp.ge.s32.totalorder %s16_s1, 8 /* loop exit test */ }
   0xf   : >> { %21 = sbr.rel (!%p17_p1) target bundleno = 10 (0xa), region = 4 }
  0x10   : > { %v4_v3 = vadd.f32 %v3_v2, %v3_v2  ;;  %v5_v4 = vadd.f32 (%p17_p1), %v3_v2, %v3_v2 }
  0x11   :  {} /* End region 4 */
  0x12   : > { %s19_s0 = sadd.s32 1, %s11_s0 }
  0x13   : > { %p20_p0 = scmp.ge.s32.totalorder %s19_s0, 4 /* loop exit test */ }
  0x14   : > { %22 = sbr.rel (!%p20_p0) target bundleno = 1 (0x1), region = 2 }
  0x15   :  {}
  0x16   :  {} /* End region 2 */
  0x17   :  { %23 = vsyncpa [#allocation3], 1 } /* exit bundle: %kernel.1 = custom-call() */
"""
UNITS = {0x1: "0 1", 0xA: "1 0", 0x10: "2 0"}
UTILIZATION = "== CAPACTIY:\nVALU, VLOAD\n    4     1\n== UTILIZATION:\n" + "".join(
    UNITS.get(address, "0 0") + "\n" for address in range(0x18)
)
ALLOCATIONS = """\
  #allocation5 [shape = 'f32[8,128]{1,0:T(8,128)}', space=vmem, size = 0x1000, scoped, tag = 'x']
  #allocation7 [shape = 's32[1]{0}', space=smem, size = 0x4, scoped, tag = 'y']
    #allocation9_spill [shape = 'u8[4096]{0}', space=vmem, size = 0x200, scoped, tag = 'z']
"""


def dump(folder, kernel="some_kernel"):
    texts = (SCHEDULE, UTILIZATION, ALLOCATIONS)
    for i, (label, text) in enumerate(zip(bundles.PASSES.split("|"), texts, strict=True)):
        (folder / f"1795-{kernel}.1-{i:02}-{label}.txt").write_text(text)
        (folder / f"1795-{kernel}.1-{i:02}-schedule-analysis_{label}.txt").write_text("")
        (folder / f"1795-fusion-{i:02}-{label}.txt").write_text("another program")


def test_loops_are_multiplied_out_and_code_of_the_first_step_is_not_counted(tmp_path):
    dump(tmp_path)
    schedule = bundles.read(tmp_path, "some_kernel", cores=1)
    # Before the inner loop 1, 2, 3, 8; in it 10 to 16, four times; after it 18, 19, 20.
    assert schedule.step.bundles == 4 + 4 * 7 + 3
    # 4, 5, 9; 17 four times; 21, 22.
    assert schedule.step.stalls == 3 + 4 + 2
    assert schedule.step.slots == {"VALU": 4 * (1 + 2), "VLOAD": 1}
    assert schedule.step.busiest == ("VALU", 12 / (4 * (35 + 9)))
    assert schedule.cores == 1
    assert schedule.vmem_bytes == 0x1200


def test_every_turn_of_the_grid_is_followed():
    turns = scalar_program.Program(SCHEDULE).steps(core=0)
    assert len(turns) == 4
    assert [turn[0x6] for turn in turns] == [1, 0, 0, 0]
    assert [turn[0xA] for turn in turns] == [4] * 4
    assert all(turn[0] == turn[0x17] == 0 for turn in turns)


def test_a_core_that_skips_the_grid_is_not_counted(tmp_path, monkeypatch):
    skip = (
        "     0   :  { %s30_s7 = sld [smem:[#allocation0]] /* core id */ }\n"
        "   0x1   :  { %p31_p7 = scmp.ne.s32.totalorder %s30_s7, 0 }\n"
        "   0x2   :  { %32 = sbr.rel (%p31_p7) target bundleno = 28 (0x1c), region = 9 }\n"
        "   0x3   :  {}\n"
        "   0x4   :  {} /* End region 9 */\n"
    )

    head, body = SCHEDULE.split("\n\n")
    body = re.sub(r"^ *(0x\w+|0)(?= )", lambda m: hex(int(m[1], 16) + 5), body, flags=re.MULTILINE)
    body = re.sub(r"bundleno = (\d+)", lambda m: f"bundleno = {int(m[1]) + 5}", body)
    monkeypatch.setattr(f"{__name__}.SCHEDULE", f"{head}\n\n{skip}{body}")
    monkeypatch.setattr(
        f"{__name__}.UTILIZATION",
        UTILIZATION.replace("UTILIZATION:\n", "UTILIZATION:\n" + 5 * "0 0\n"),
    )
    dump(tmp_path)
    schedule = bundles.read(tmp_path, "some_kernel", cores=2)
    assert schedule.cores == 1
    assert schedule.step.bundles == 35


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("%s18_s3, 0 ", "%s99_s5, 0 ", "bundle 0x3: what its branch depends on is not known"),
        ("smov.u32 0 /* copy", "spop %99 /* copy", "bundle 0xf: what its branch depends on"),
        ("totalorder %s19_s0, 4", "totalorder %s19_s0, 1", "no two of the grid's 1 steps"),
        ("  0x15   :  {}\n", "", "expected bundle 0x15 of the schedule, got 0x16"),
        ("/* End region 4 */", "", "bundles late: expected one number"),
        ("bundleno = 1 (0x1)", "bundleno = 23 (0x17)", "s11_s0: expected two paths into a loop"),
        ("bundleno = 1 (0x1)", "bundleno = 18 (0x12)", "one loop around all others.* got 2"),
        ("sbr.rel (!%p20_p0)", "sbr.ind (!%p20_p0)", "cannot follow the branch"),
        ("sadd.s32 2, %s15_s2", "sadd.s32 0, %s15_s2", "does not come to an end"),
    ],
)
def test_what_cannot_be_followed_is_an_error(tmp_path, monkeypatch, old, new, message):
    assert old in SCHEDULE
    monkeypatch.setattr(f"{__name__}.SCHEDULE", SCHEDULE.replace(old, new))
    dump(tmp_path)
    with pytest.raises(ValueError, match=message):
        bundles.read(tmp_path, "some_kernel", cores=1)


def test_a_missing_kernel_is_named(tmp_path):
    dump(tmp_path)
    with pytest.raises(ValueError, match="other_kernel: expected one dump of the pass packed"):
        bundles.read(tmp_path, "other_kernel", cores=1)


@pytest.mark.parametrize(
    "name, values, result",
    [
        ("sadd.s32", [1, 2**32 - 1], 0),
        ("ssub.s32", [1, 2], 2**32 - 1),
        ("sshra.s32", [2**32 - 8, 1], 2**32 - 4),
        ("sshll.u32", [2**31, 1], 0),
        ("scmp.lt.s32.totalorder", [2**32 - 1, 0], 1),
        ("scmp.lt.u32.totalorder", [2**32 - 1, 0], 0),
        ("scalar_select", [0, 5, 6], 6),
        ("scalar_select", [None, 5, 6], None),
        ("por", [None, 1], 1),
        ("por", [None, 0], None),
        ("pnand", [None, 0], 1),
        ("pnand", [1, 1], 0),
        ("pneg", [0], 1),
        ("sadd.s32", [1, None], None),
        ("scalar_lea.vmem", [1, 2], None),
    ],
)
def test_scalar_arithmetic_is_that_of_32_bits_and_knows_what_it_does_not_know(name, values, result):
    assert scalar_program.evaluate(name, values) == result


def test_predicates_decide_what_is_executed():
    text = SCHEDULE.replace(
        "0x8 PF: > { %s13_s1 = smov.u32 0 /* copy for cssa */ }",
        # In the first step only, the inner loop starts at 4.
        "0x8 PF: > { %s40_s1 = smov.u32 0  ;;  %s13_s1 = smov.u32 (%p12_p0, %s41_s1), 0 }",
    ).replace("%v2_v1 } /* Start region 3 */", "%v2_v1  ;;  %s41_s1 = smov.u32 4 }")
    assert text != SCHEDULE
    turns = scalar_program.Program(text).steps(core=0)
    assert [turn[0xA] for turn in turns] == [2, 4, 4, 4]
