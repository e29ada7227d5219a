def resume(parts):
    return 0


def save(parts, step):
    pass
