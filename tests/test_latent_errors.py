"""Errors of latent attention on synthetic latents."""

from __future__ import annotations

from latent_errors import compare_latent_formats, sample_latents


def test_rope_parts_of_uneven_pairs_want_precision():
    rows = {
        (r.kind, r.format): r
        for r in compare_latent_formats(["craw", "c4", "c4r8", "c4rfp8", "c4r4"], 128, 64, seeds=1)
    }
    for kind in ("random", "heavy"):
        assert rows[kind, "craw"].output < 0.01
        assert 0.05 < rows[kind, "c4"].latent < 0.15
        assert rows[kind, "c4"].output_rope_only < 0.01
        assert rows[kind, "c4r4"].output_rope_only > 0.05
    # A rotation spreads the error of the large pairs over the small ones, to which the queries are sensitive.
    assert rows["heavy", "c4r8"].output_rope_only > 2 * rows["heavy", "c4rfp8"].output_rope_only
    assert rows["random", "c4r8"].output_rope_only < rows["random", "c4rfp8"].output_rope_only


def test_a_shared_part_costs_what_centring_gains():
    """The error is proportional to the stored norm, but a part that all tokens share changes no probability."""
    rows = {r.kind: r for r in compare_latent_formats(["c4"], 128, 64, seeds=1)}
    assert rows["shared"].output_centred < 0.7 * rows["shared"].output
    for kind in ("random", "heavy"):
        assert 0.8 < rows[kind].output_centred / rows[kind].output < 1.2


def test_the_same_seed_gives_the_same_sample():
    first, again = (sample_latents("heavy", 64, 128, 32, seed=3) for _ in range(2))
    assert (first.latent == again.latent).all()
    assert (first.query_rope == again.query_rope).all()
