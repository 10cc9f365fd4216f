"""Training from Python, cell by cell: an editor that knows `# %%` runs this file as a notebook.

python examples/from_python.py
"""

# %% A recipe, with a few fields changed
import hyperbatch

config = hyperbatch.get_recipe("digits", epochs=5, target_top1=None, nproc=1, device="cpu", out="runs/from_python")
print(f"{config.model.model} on {config.data.dataset}")


# %% A callback that keeps what it is told
class Curve(hyperbatch.Callback):
    def __init__(self):
        self.losses, self.accuracy = [], {}

    def on_step(self, event):
        self.losses.append(event.loss)

    def on_eval(self, event):
        self.accuracy[event.epoch] = event.top1
        print(f"epoch {event.epoch:.1f}: top-1 {event.top1:.2%}")


curve = Curve()

# %% Train
record = hyperbatch.train(config, callbacks=[curve])
print(f"{record.result.steps} steps, loss {curve.losses[0]:.2f} -> {curve.losses[-1]:.2f}")

# %% The same rows as metrics.jsonl: pandas.DataFrame(rows) makes a table of them
rows = record.metrics("step")
print(sorted(rows[0]))

# %% Two epochs more, from the folder alone
longer = hyperbatch.load_config("runs/from_python", out="runs/from_python", resume=True, epochs=7)
record = hyperbatch.train(longer, callbacks=[curve])
print(f"top-1 {record.result.top1:.2%} after {record.result.epochs:.1f} epochs")
