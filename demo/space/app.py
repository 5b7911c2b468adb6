"""The demo as a Space of the Hugging Face hub."""

from vlattn.demo.app import launch
from vlattn.demo.models import Model

launch([Model.load("flickr8k-small")], host="0.0.0.0")
