"""Runs, counts, and how a creator reads them."""

import pytest
from sageattention3.nodes.engine.ledger import HOST, RUNS_KEPT, Ledger, Run
from sageattention3.nodes.engine.summary import SENTENCE_WIDTH, describe_run, describe_runs

EMULATION = "reference emulation"


def sampled(ledger, layers=("double.0", "double.1"), steps=2, calls=1):
    """A run in which every layer but the first is quantised."""
    ledger.begin_run()
    for step in range(steps):
        ledger.begin_forward(step, steps)
        for layer in layers:
            for _ in range(calls):
                if layer == layers[0]:
                    ledger.record(layer, "fp16", HOST, "kept in fp16", False)
                else:
                    ledger.record(layer, "int8", EMULATION, "", False)
    return ledger.end_run()


def test_every_recorded_call_is_in_the_counts():
    run = sampled(Ledger("flux"), steps=3, calls=2)
    assert run.calls == 3 * 2 * 2
    assert {entry.step for entry in run.counts} == {0, 1, 2}


def test_each_run_starts_afresh():
    ledger = Ledger("flux")
    first, second = sampled(ledger), sampled(ledger)
    assert first is not second
    assert first.calls == second.calls == 4


def test_a_call_outside_of_any_run_opens_one():
    ledger = Ledger("flux")
    ledger.record("outside", "fp16", HOST, "no forward pass", True)
    assert ledger.end_run().calls == 1
    assert ledger.end_run() is None


def test_only_the_last_runs_are_kept():
    ledger = Ledger("flux")
    for _ in range(RUNS_KEPT + 3):
        sampled(ledger)
    assert len(ledger.runs) == RUNS_KEPT


def test_a_report_shows_each_run_since_the_last_report_then_the_last_again():
    ledger = Ledger("flux")
    assert ledger.take_unreported() == ([], False, 0)
    a, b = sampled(ledger), sampled(ledger)
    assert taken(ledger) == ([id(a), id(b)], False, 0)
    c = sampled(ledger)
    assert taken(ledger) == ([id(c)], False, 0)
    for _ in range(2):
        assert taken(ledger) == ([id(c)], True, 0)
    d = sampled(ledger)
    assert taken(ledger) == ([id(d)], False, 0)


def taken(ledger):
    news = ledger.take_unreported()
    return [id(run) for run in news.runs], news.repeated, news.dropped


def test_a_report_counts_the_runs_that_are_no_longer_kept():
    ledger = Ledger("flux")
    sampled(ledger)
    ledger.take_unreported()
    for _ in range(RUNS_KEPT):
        sampled(ledger)
    news = ledger.take_unreported()
    assert (len(news.runs), news.dropped) == (RUNS_KEPT, 0)
    for _ in range(RUNS_KEPT + 3):
        sampled(ledger)
    news = ledger.take_unreported()
    assert (len(news.runs), news.dropped) == (RUNS_KEPT, 3)
    text = describe_runs(news.runs, dropped=news.dropped)
    assert text.startswith(
        "Not shown: the first 3 runs of 35 since the last report; only 32 are kept"
    )
    assert "\n\nRun 4 of 35: " in text
    assert "\n\nRun 35 of 35: " in text


def test_calls_after_a_report_are_news_even_where_no_callback_opened_a_run():
    ledger = Ledger("flux")
    ledger.record("outside", "fp16", HOST, "no callbacks", True)
    assert ledger.take_unreported().runs[0].calls == 1
    ledger.record("outside", "fp16", HOST, "no callbacks", True)
    news = ledger.take_unreported()
    assert not news.repeated
    assert news.runs[0].calls == 1


def test_an_interrupted_run_says_where_in_the_sentence_and_in_each_row():
    ledger = Ledger("flux")
    ledger.begin_run()
    ledger.begin_forward(1, 300)
    ledger.record("double.0", "int8", EMULATION, "", False)
    run = ledger.end_run(interrupted=True)
    assert describe_run(run) == (
        "Interrupted at step 2 of 300. All 1 attention call ran in int8 (reference emulation)"
    )
    assert [(row["interrupted"], row["repeated"]) for row in run.rows(repeated=True)] == [
        (True, True)
    ]
    assert not any(row["interrupted"] or row["repeated"] for row in sampled(ledger).rows())


def test_a_run_that_was_interrupted_before_the_model_ran_accuses_nobody():
    ledger = Ledger("flux")
    ledger.begin_run()
    run = ledger.end_run(interrupted=True)
    assert describe_run(run) == "Interrupted before the first step"
    assert not run.wanted_but_never_quantised()


def test_a_cell_shows_what_most_calls_of_a_layer_in_a_step_ran_in():
    ledger = Ledger("flux")
    ledger.begin_run()
    ledger.begin_forward(0, 1)
    ledger.record("double.0", "fp16", HOST, "short", False)
    for _ in range(2):
        ledger.record("double.0", "int8", EMULATION, "", False)
    assert ledger.end_run().cells()["double.0", 0].precision == "int8"


def test_the_first_sentence_counts_what_ran_and_says_why_the_rest_did_not():
    run = sampled(Ledger("flux"), layers=("double.0", "double.1", "double.2"), steps=400)
    assert describe_run(run) == (
        "800 of 1,200 attention calls ran in int8 (reference emulation); "
        "400 stayed with the host: kept in fp16"
    )


def test_several_precisions_and_reasons_are_listed_by_weight():
    ledger = Ledger("flux")
    ledger.begin_run()
    ledger.begin_forward(0, 1)
    for precision, backend, reason, calls in (
        ("int8", "sm80_int8", "", 1),
        ("fp4", "sm120_fp4", "", 5),
        ("fp16", HOST, "short", 1),
        ("fp16", HOST, "cross-attention kept in fp16", 2),
    ):
        for _ in range(calls):
            ledger.record("double.0", precision, backend, reason, False)
    assert describe_run(ledger.end_run()) == (
        "6 of 9 attention calls ran quantised: 5 in fp4 (sm120_fp4), 1 in int8 (sm80_int8); "
        "3 stayed with the host (2: cross-attention kept in fp16; 1: short)"
    )


def test_rare_reasons_are_summed_up_in_the_sentence_and_listed_in_the_table():
    ledger = Ledger("flux")
    ledger.begin_run()
    ledger.begin_forward(0, 1)
    for number in range(5):
        for _ in range(5 - number):
            ledger.record("double.0", "fp16", HOST, f"reason {number}", True)
    text = describe_runs(ledger.runs)
    sentence, _, table = text.partition("\nflux, ")
    assert max(len(line) for line in sentence.splitlines()) <= SENTENCE_WIDTH
    assert " ".join(sentence.split()).endswith(
        "5: reason 0; 4: reason 1; 3: reason 2; 3: 2 other reasons, see below)"
    )
    assert "reason 4" in table


def test_a_run_of_fallbacks_alone_is_worth_a_warning_and_a_chosen_fp16_is_not():
    ledger = Ledger("qwen")
    ledger.begin_run()
    ledger.record("double.0", "fp16", HOST, "no kernel takes masks", True)
    masked = ledger.end_run()
    assert masked.wanted_but_never_quantised()
    assert (
        describe_run(masked) == "All 1 attention call stayed with the host: no kernel takes masks"
    )

    ledger.begin_run()
    ledger.record("double.0", "fp16", HOST, "the plan is fp16", False)
    assert not ledger.end_run().wanted_but_never_quantised()
    assert not sampled(ledger).wanted_but_never_quantised()


def test_no_call_at_all_is_explained():
    own_attention = Run("nunchaku", forwards=4)
    assert "this model uses its own attention" in describe_run(own_attention)
    assert own_attention.wanted_but_never_quantised()
    replaced = Run("flux", forwards=4, replaced_by="kjnodes.sage.attention_override_sage")
    assert "kjnodes.sage.attention_override_sage" in describe_run(replaced)
    assert "before the model ran" in describe_run(Run("flux"))


def test_the_table_groups_layers_into_ranges_that_a_selector_reads():
    ledger = Ledger("wan")
    layers = [f"block.{n}.{role}" for n in (0, 1, 2, 5) for role in ("self", "cross")]
    sampled(ledger, layers=["input.4.1.self", *layers], steps=4)
    rows = describe_runs(ledger.runs).splitlines()
    assert any(row.startswith("input.4.1.self  ") and row.endswith("kept in fp16") for row in rows)
    assert any(row.startswith("block.0-2.cross, block.5.cross ") for row in rows)
    [row] = [row for row in rows if row.startswith("block.0-2.self, block.5.self ")]
    assert row.split()[2:] == ["int8", *EMULATION.split(), "16", "1-4"]


def test_columns_are_aligned_and_long_layer_lists_wrap():
    ledger = Ledger("flux")
    sampled(ledger, layers=["single.1", *(f"single.{n}" for n in range(0, 60, 3))])
    lines = describe_runs(ledger.runs).splitlines()
    head = next(line for line in lines if line.startswith("layers"))
    column = head.index("precision")
    body = lines[lines.index(head) + 2 :]
    assert len(body) > 2
    assert all(line[column - 1 : column] in (" ", "") for line in body)


def test_layers_that_were_never_called_are_named():
    ledger = Ledger("flux")
    sampled(ledger)
    ids = ["double.0", "double.1", "single.0", "single.1"]
    assert "never called: single.0-1 (" in describe_runs(ledger.runs, ids)
    assert "never called" not in describe_runs(ledger.runs, ids[:2])


def test_several_runs_are_told_apart():
    ledger = Ledger("flux")
    sampled(ledger)
    sampled(ledger)
    text = describe_runs(ledger.take_unreported().runs)
    assert text.startswith("Run 1 of 2: 2 of 4 attention calls")
    assert "\n\nRun 2 of 2: " in text


def test_compiled_code_is_reported_without_invented_counts():
    ledger = Ledger("flux")
    ledger.begin_run()
    for step in range(20):
        ledger.begin_forward(step, 20)
        ledger.current.compiled_forwards += 1
        ledger.record_compiled("double.0", "int8", EMULATION, "", False)
    run = ledger.end_run()
    assert run.calls == 0
    assert len(run.cells()) == 20
    text = describe_runs([run])
    assert text.startswith("20 forward passes ran code compiled by torch.compile")
    assert "int8 (reference emulation)" in text.partition("\n\n")[0]
    [row] = [row for row in text.splitlines() if row.startswith("double.0 ")]
    assert row.split() == ["double.0", "int8", *EMULATION.split(), "-", "1-20"]


@pytest.mark.parametrize("runs", [[], ()])
def test_no_run_yet_says_what_to_connect(runs):
    assert describe_runs(runs).startswith("No sampling run yet")
