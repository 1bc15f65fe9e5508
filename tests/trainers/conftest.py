import pytest


@pytest.fixture
def by_hand():
    """``(job) -> model``: the loop that a Job stands for, without Vivace's."""

    def train(job):
        model = job.model().train()
        optimizer = job.optimizer(model)
        scheduler = job.scheduler(optimizer)
        for _ in range(job.epochs):
            for batch in job.data():
                job.loss(model, batch).backward()
                job.on_gradients(model)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return model

    return train
