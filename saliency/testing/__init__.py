"""Check that a subclass of `Attribution`, including your own, fulfils the guarantees of this toolkit.

    from saliency.testing import check_method

    check_method(MyCAM)

or, with one test per guarantee:

    @pytest.mark.parametrize(("name", "check"), checks(MyCAM))
    def test_my_cam(name, check):
        check()

`assert_same_explanation` compares an explanation with a saved one, to notice when a map of your model changes.
The names load on first use.
"""

from .. import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)
