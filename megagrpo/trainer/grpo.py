"""The loop of GRPO: draw, roll out, compare within the group, update, report.

One verb per line. Everything that can be switched off is an object that answers with nothing, so
the loop has no branches. arXiv 2402.03300, algorithm 1, with the engine as rollout policy, the
trainer as current policy and one frozen reference.
"""

from megagrpo.trainer.run import Run


def train(run: Run) -> None:
    """Run every step that is left; all ranks of the world call it."""
    run.begin()
    for step in run.remaining_steps():
        prompts = run.draw()
        samples = run.roll_out(prompts, step)
        batch = run.compare_groups(samples)
        batch = run.policy.score_old(batch, step)
        batch = run.reference.score(batch)
        batch = run.charge_kl(batch)
        outcome = run.policy.update(batch)
        evaluation = run.evaluate(step)
        run.report(step, batch, outcome, evaluation)
        run.save(step)
    run.end()
