"""`vivace run` on a script that trains through Keras: left as it is, with the way that there is."""

import sys

import pytest

import vivace

pytest.importorskip("keras")

SCRIPT = """
import keras, numpy
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
model.compile("sgd", "mse")
model.fit(numpy.ones((16, 4)), numpy.ones((16, 2)), batch_size=4, verbose=0)
print("trained", int(model.optimizer.iterations.value))
"""


def test_a_script_that_trains_through_keras_is_left_alone_and_told_the_way(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ran = vivace.run([sys.executable, str(script)], out=tmp_path / "run")
    assert ran.exit_code == 0
    assert ran.document["outcome"] == "nothing_seen"
    assert "vivace.Job.from_keras(model, x, y" in ran.document["reason"]
    assert "trained 4" in capfd.readouterr().out
