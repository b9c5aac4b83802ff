"""What the Hub itself says of a card."""

from huggingface_hub import constants
from huggingface_hub.utils import get_session, hf_raise_for_status


def ask_the_hub(card: str, endpoint: str | None = None):
    """Asks the Hub about a card as it stands: huggingface_hub's own reading of it knows less than the Hub.

    Raises:
        ValueError: the Hub refuses its front matter, with the Hub's reasons.
        HTTPError, OSError: the Hub cannot be asked.
    """
    place = f"{endpoint or constants.ENDPOINT}/api/validate-yaml"
    answer = get_session().post(place, json={"repoType": "model", "content": card})
    if answer.status_code == 400:
        raise ValueError(f"the Hub refuses its front matter: {' '.join(answer.text.split())}")
    hf_raise_for_status(answer)
