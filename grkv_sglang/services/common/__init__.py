"""What the services share.

- `markdown.render`: text of a model as safe HTML
- `events.event`: one server-sent event
- `engine.problem_of`: an error of the engine's client as a person is told it
- `web`: errors as JSON, bounded bodies, same-origin writes, security headers (`protect`)
- `serve.run`: uvicorn with a graceful stop
- `static/base.css`: the style of the pages (`STATIC_DIR`)
"""

from pathlib import Path

STATIC_DIR = Path(__file__).parent / "static"
