"""Reading a running function's variables leaves no trace in it."""

import inspect
import weakref

from torch import nn

from vivace.live.frames import variables

# pytest makes a test that asserts look at its own variables: what is read here asserts nothing itself.


class Large:
    pass


def asked(frame):
    return dict(variables(frame))


def lets_go():
    large = Large()
    gone = weakref.ref(large)
    known = "large" in asked(inspect.currentframe())
    del large
    return known, gone() is None


def looks_at_itself(lr=0.1, epochs=2):
    settings = locals()
    model = Large()
    found = asked(inspect.currentframe())
    return settings, found, model


def counts():
    count = 0
    for _ in range(3):
        count += asked(inspect.currentframe())["count"] + 1
    return count


def test_nothing_is_kept_alive():
    assert lets_go() == (True, True)


def test_a_function_that_looks_at_its_own_variables_is_not_asked():
    settings, found, _ = looks_at_itself()
    assert settings == {"lr": 0.1, "epochs": 2}
    assert found == {}


def evaluates(model, epochs=2):
    model.eval()
    return asked(inspect.currentframe())


def computes(text, epochs=2):
    eval(text)
    return asked(inspect.currentframe())


def test_a_model_that_is_put_into_evaluation_is_no_eval_of_its_own_variables():
    """As in most functions that hold the loop over epochs: how long these are going to be is read there."""
    assert evaluates(nn.Identity())["epochs"] == 2
    assert computes("1") == {}


def shows(arguments, epochs=2):
    vars(arguments), dir(arguments)
    return asked(inspect.currentframe())


def shows_itself(epochs=2):
    vars()
    return asked(inspect.currentframe())


def hands_on(arguments, epochs=2):
    sorted([arguments], key=lambda one, read=vars: 0)
    return asked(inspect.currentframe())


def test_what_reads_the_variables_of_another_object_reads_none_of_its_own():
    """`print(vars(arguments))` stands in most scripts."""
    assert shows(Large())["epochs"] == 2
    assert shows_itself() == {}
    assert hands_on(Large()) == {}


def test_variables_can_still_be_read_and_changed():
    assert counts() == 7
