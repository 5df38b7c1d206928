"""Other work for the thread of host updates."""


def until(event):
    """Work that ends when the event has happened."""

    def run():
        event.wait(200)

    return run
