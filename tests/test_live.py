"""What the benchmarks of live fleets keep from run to run."""

from benchmarks import live


def test_a_quick_profile_is_of_quick_runs_alone(tmp_path, monkeypatch):
    def paceline(folder, *arguments):
        (folder / arguments[arguments.index("--out") + 1]).write_text("quick" if "--quick" in arguments else "full")
        measured.append(arguments)

    measured = []
    monkeypatch.setattr(live, "paceline", paceline)
    for quick in (True, False, False, True):
        live.profiled(tmp_path, quick)
        assert (tmp_path / "profile.json").read_text() == ("quick" if quick else "full")
    assert len(measured) == 2
