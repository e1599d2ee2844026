"""Modules, loops and trackers of other trainers: what docs/ecosystem.md says, without them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.modules import Modules

torch = pytest.importorskip("torch")

from torch import nn, optim  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

import zmqtrain  # noqa: E402
from tests.adapters.frameworks import Torch  # noqa: E402
from tests.adapters.step import BATCH, X, Y, same  # noqa: E402
from zmqtrain.adapters.torch import TorchModel  # noqa: E402
from zmqtrain.data import Arrays  # noqa: E402
from zmqtrain.errors import ConfigError  # noqa: E402
from zmqtrain.optim import SGD  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs/ecosystem.md").read_text()
STEPS = 5


def recipe(section: str, number: int = 0, **names: Any) -> dict[str, Any]:
    """Run a block of code of the page with what a user has; return its names."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number], names)
    return names


class LightningModule(nn.Module):
    """Has of Lightning's class what a module that uses none of its Trainer meets."""

    automatic_optimization = True
    trainer: Any = None

    @property
    def global_step(self) -> Any:
        return self.trainer.global_step if self.trainer else 0

    def log(self, name: str, value: Any, **options: Any) -> None:
        raise AssertionError("there is no trainer")

    def log_dict(self, values: dict[str, Any], **options: Any) -> None:
        for name, value in values.items():
            self.log(name=name, value=value, **options)

    def on_train_epoch_end(self) -> None: ...
    def optimizer_step(self, *arguments: Any) -> None: ...
    def train_dataloader(self) -> None: ...
    def test_step(self, batch: Any, batch_idx: int) -> None: ...
    def validation_step(self, batch: Any, batch_idx: int) -> None: ...
    def predict_step(self, batch: Any, batch_idx: int) -> None: ...


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Torch().net()

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("number", batch_idx, prog_bar=True)
        return {"loss": F.cross_entropy(self(batch[0]), batch[1]), "outputs": batch[0]}

    def configure_optimizers(self) -> Any:
        optimizer = optim.AdamW(self.parameters(), lr=0.05)
        scheduler = {"scheduler": lr_scheduler.StepLR(optimizer, 2), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def train_dataloader(self) -> None: ...
    def test_step(self, batch: Any, batch_idx: int) -> None: ...


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert not self.training and not torch.is_grad_enabled()
        self.log_dict({"val_loss": F.cross_entropy(self(batch[0]), batch[1]), "val_acc": 0.25})

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).softmax(1)


def job(build: Any = Net, **options: Any) -> zmqtrain.Job:
    end = {} if "epochs" in options else {"steps": STEPS}
    given = {"data": BATCH, "batch_size": len(X)} | end | options
    return zmqtrain.Job(model=TorchModel(build), **given)


def by_torch(build: Any, step: Any, made: Any, clip: float = 1.0) -> dict[str, Any]:
    """Return the parameters after steps of torch's own on one batch."""
    torch.manual_seed(0)
    module = build()
    optimizer, *schedulers = made(module)
    for _ in range(STEPS):
        optimizer.zero_grad()
        step(module).backward()
        nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return {name: value.detach().numpy() for name, value in module.named_parameters()}


def test_lightning_module_trains_as_by_its_own_steps_and_optimizer() -> None:
    def made(module: Any) -> Any:
        given = module.configure_optimizers()
        return given["optimizer"], given["lr_scheduler"]["scheduler"]

    torch.manual_seed(0)
    tensors = (torch.tensor(X), torch.tensor(Y))
    expected = by_torch(Net, lambda module: F.cross_entropy(module(tensors[0]), tensors[1]), made)
    same(zmqtrain.run(job(clip_norm=1.0)).parameters, expected, 2e-6)


def test_recipe_of_lightning_measures_what_a_module_logs_under_its_names() -> None:
    found = []
    for build in Validated, Net:
        given = recipe("Lightning", Net=build, data=Arrays(BATCH, BATCH))["job"]
        found.append(zmqtrain.run(given.with_overrides(batch_size=4)).history.history)
    validated, plain = found
    assert set(validated) == {"loss", "number", "val_loss", "val_acc"}
    assert (validated["number"], validated["val_acc"]) == ([0.0] * 5, [0.25] * 5)
    assert validated["val_loss"] == pytest.approx(plain["val_loss"])  # of training_step in eval


def test_lightning_module_predicts_by_its_own_step() -> None:
    trainer = zmqtrain.Trainer(TorchModel(Validated))
    np.testing.assert_allclose(trainer.predict(BATCH).sum(axis=1), 1, rtol=1e-5)


def test_step_and_optimizer_that_are_given_replace_those_of_a_lightning_module() -> None:
    model = TorchModel(Validated, training_step=lambda module, batch: module(batch[0]).sum() * 0)
    given = zmqtrain.Job(model=model, data=BATCH, optimizer=SGD(1.0), steps=2, batch_size=4)
    assert zmqtrain.run(given).train_loss == 0
    assert job(optimizer=SGD(1.0)).optimizer == SGD(1.0)


def made_of(form: Any) -> type:
    class Configured(Net):
        def configure_optimizers(self) -> Any:
            optimizer = optim.SGD(self.parameters(), lr=0.1)
            return form(optimizer, lr_scheduler.StepLR(optimizer, 2, gamma=0.5))

    return Configured


def by_step(scheduler: Any, **options: Any) -> dict[str, Any]:
    return {"scheduler": scheduler, "interval": "step"} | options


FORMS = {
    "alone": (lambda o, s: o, 0.1),
    "in a list": (lambda o, s: [o], 0.1),
    "in a dict": (lambda o, s: [{"optimizer": o}], 0.1),
    "two lists": (lambda o, s: ([o], []), 0.1),
    "by step": (lambda o, s: ([o], [by_step(s)]), 0.05),
    "by steps": (lambda o, s: {"optimizer": o, "lr_scheduler": by_step(s, frequency=2)}, 0.1),
}


@pytest.mark.parametrize(("form", "third"), FORMS.values(), ids=FORMS)
def test_forms_of_configure_optimizers_are_taken(form: Any, third: float) -> None:
    rate = job(made_of(form)).optimizer.learning_rate
    assert (rate(2) if callable(rate) else rate) == pytest.approx(third)


def hooked(**methods: Any) -> type:
    return type("Hooked", (Net,), methods)


def logging_at(**options: Any) -> type:
    return hooked(training_step=lambda self, batch: self.log("acc", **options))


REFUSED = {
    "hooks": (
        hooked(on_train_epoch_end=print, optimizer_step=print),
        "Hooked has on_train_epoch_end, optimizer_step, .*nothing .* but configure_optimizers",
    ),
    "manual": (hooked(automatic_optimization=False), "has automatic_optimization"),
    "a trainer": (
        hooked(training_step=lambda self, batch: self(batch[0]).mean() * self.global_step),
        "uses trainer.global_step; .*callback of the job",
    ),
    "a trainer of an optimizer": (
        hooked(configure_optimizers=lambda self: optim.SGD(self.trainer.rates)),
        "uses trainer.rates",
    ),
    "a metric": (logging_at(value=nn.Identity()), r"log\('acc'\) gets a Identity.*expected a mean"),
    "a sum": (logging_at(value=1.0, reduce_fx="sum"), "reduce_fx='sum'"),
    "no loss": (hooked(training_step=lambda self, batch: None), "loss of .* is a NoneType"),
    "an optimizer twice": (made_of(lambda o, s: [o, o]), "has .* twice"),
    "several schedulers": (made_of(lambda o, s: ([o], [s, s])), "list of torch .*scheduler"),
    "epochs": (made_of(lambda o, s: ([o], [s])), "StepLR after each 'epoch' .*\"frequency\": n"),
}


@pytest.mark.parametrize(("build", "text"), REFUSED.values(), ids=REFUSED)
def test_what_needs_the_trainer_of_lightning_is_refused(build: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        zmqtrain.run(job(build))


class Classifier(nn.Module):
    """Is called as a model of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        mask = attention_mask[..., None]
        logits = self.head((self.embedding(input_ids) * mask).sum(1) / mask.sum(1))
        return SimpleNamespace(loss=F.cross_entropy(logits, labels), logits=logits)


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row["ids"]) for row in rows], batch_first=True)
    labels = torch.tensor([row["label"] for row in rows])
    return {"labels": labels, "input_ids": ids, "attention_mask": (ids > 0).long()}


def test_recipe_of_hugging_face_trains_as_its_trainer() -> None:
    rows = [{"ids": list(range(1, 2 + n)), "label": n % 3} for n in range(8)]
    given = recipe("Hugging Face", build=Classifier, train_dataset=rows, data_collator=padded)

    def made(module: Any) -> Any:
        optimizer = optim.AdamW(module.parameters(), lr=5e-5, weight_decay=0.0)
        return optimizer, lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 1000)

    expected = by_torch(Classifier, lambda module: module(**padded(rows)).loss, made)
    given_job = given["job"]
    assert (given_job.optimizer.learning_rate(500), given_job.clip_norm) == (2.5e-5, 1.0)
    found = zmqtrain.run(given_job.with_overrides(steps=STEPS)).parameters
    same(found, expected, 1e-6)


def test_recipe_of_accelerate_trains_as_its_loop() -> None:
    data = np.tile(X, (9, 1))[:100], np.tile(Y, 9)[:100]
    names = recipe("Accelerate", build=Torch().net, data=data, steps=STEPS)

    def loss(module: Any) -> Any:
        return F.cross_entropy(module(torch.tensor(data[0])), torch.tensor(data[1]))

    expected = by_torch(
        Torch().net, loss, lambda module: [optim.AdamW(module.parameters(), lr=0.001)], np.inf
    )
    found = {name: value.detach().numpy() for name, value in names["model"].named_parameters()}
    same(found, expected, 1e-6)


class Tracker:
    """The module of a tracker: keeps what its runs log, by id."""

    def __init__(self) -> None:
        self.runs: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self._run = ""

    def init(self, *, id: str, resume: str, project: str) -> None:
        assert resume == "allow"
        self._run = id
        self.runs.setdefault(id, [])

    def log(self, values: dict[str, float], step: int) -> None:
        self.runs[self._run].append((step, values))

    def finish(self) -> None:
        self._run = ""

    @contextmanager
    def start_run(self, run_id: str | None) -> Iterator[Any]:
        run_id = run_id or f"run {len(self.runs)}"
        self.init(id=run_id, resume="allow", project="")
        yield SimpleNamespace(info=SimpleNamespace(run_id=run_id))
        self.finish()

    log_metrics = log


@pytest.mark.parametrize(("module", "number"), [("mlflow", 0), ("wandb", 1)])
def test_recipe_of_a_tracker_has_one_run_of_all_workers_and_lives(
    module: str, number: int, tmp_path: Path, modules: Modules
) -> None:
    tracker = Tracker()
    modules(module, tracker)
    for epochs in 2, 4:
        names = recipe("Trackers", number)  # another process would run the job's file again
        callback = names["MLflow"]() if module == "mlflow" else names["tracker"]
        resumed = job(epochs=epochs, batch_size=4, callbacks=[callback])
        zmqtrain.run(resumed.with_overrides(logdir=str(tmp_path)), workers=2)
    ((_, logged),) = tracker.runs.items()
    assert [step for step, _ in logged] == [0, 1, 2, 3]
    assert all(values["loss"] > 0 for _, values in logged)
