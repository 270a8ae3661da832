from slimkv.lab.evals.scales import compare_scale_formats


def test_only_our_format_is_precise_and_wide():
    results = {r.name: r for r in compare_scale_formats()}
    assert results["float32"].over_exact == (1.0,) * 5
    ours, half, brain = results["ue6m10"], results["float16"], results["bfloat16"]
    assert max(ours.over_exact) < 1.005
    assert all(value is not None and abs(value - 1) < 0.01 for value in ours.at_norm.values())
    assert brain.over_exact[-1] > 1.02  # too coarse for 8-bit codes
    assert half.at_norm["1e-06"] > 2  # too narrow for small keys
    assert half.at_norm["1e+08"] is None or half.at_norm["1e+08"] > 2
