"""A training loop of your own in NumPy: y = 2x + noise, with the gradient by hand.

python examples/own_loop_numpy.py
zmqtrain run examples/own_loop_numpy.py --workers 2
"""

import zmqtrain
from zmqtrain import Job
from zmqtrain.data import NoisyLine
from zmqtrain.models import LinearRegression
from zmqtrain.optim import SGD

job = Job(
    model=LinearRegression(),  # or any object with parameters, loss_and_gradients and metrics
    data=NoisyLine(slope=2.0, noise=0.3),
    optimizer=SGD(0.001),
    batch_size=1,
    steps=4000,
    own_loop=True,
)

if __name__ == "__main__":
    with zmqtrain.attach(job) as session:
        for parameters, (x, y), gradients in session.batches():
            error = x @ parameters["weights"] + parameters["bias"] - y
            gradients["weights"][...] = 2 * x.T @ error / len(x)
            gradients["bias"][...] = 2 * error.mean(axis=0)
            step = session.step((error**2).mean())
            if session.steps % 500 == 0:
                print(
                    f"Worker {session.worker}: training step {session.steps} done "
                    f"(global step: {step}), W {parameters['weights'].item():.3f}"
                )
