"""Images in class folders, as for torchvision's `ImageFolder`: the same classes, images and order."""

import os
from collections.abc import Iterator
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from errors import UserError
from files import open_to_read
from loading.index import ImageIndex, Scan, check_num_bytes
from loading.progress import Progress
from loading.source import Source

# Extensions that are recognised without a conversion to lower case.
_USUAL_EXTENSIONS = (".JPEG", *IMG_EXTENSIONS)


class FolderIndex(ImageIndex):
    """The images of a folder with one folder for each class; links are followed."""

    form = "folder"
    layout = "train/ and val/, with one folder for each class"

    @classmethod
    def find(cls, root: Path) -> list[Source]:
        """Return the folder, if there is one."""
        return [cls(root)] if root.is_dir() else []

    def path(self, number: int) -> str:
        """Return the path of an image."""
        return os.path.join(self.root, self.name(number))

    def size(self, number: int) -> int:
        """Return the bytes of an image's file."""
        return os.stat(self.path(number)).st_size

    def read(self, number: int) -> bytes:
        """Return the bytes of an image's file; raises as `Source.read`."""
        with open_to_read(self.path(number), buffering=0) as file:
            check_num_bytes(os.fstat(file.fileno()).st_size)
            return file.read()

    def scan(self, scan: Scan) -> list[str]:
        """Add the images that `ImageFolder` finds, in its order, and return the classes."""
        root = str(self.root)
        scan.watch(root, os.stat(root))
        stray, classes = _list_folder(root, scan)
        self.check_classes(classes, len(stray))
        progress = Progress(f"scanning {root}", len(classes), "class folders")
        for label, name in enumerate(classes):
            # Sorted by whole paths as strings, like ImageFolder: "a b" comes before "a/b".
            for folder, names in sorted(_walk(root, name, scan)):
                scan.add(folder, label, names)
            progress.update()
        return classes


def _walk(root: str, folder: str, scan: Scan, parents: tuple = ()) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and those below it, following links, with the images in each."""
    path = os.path.join(root, folder)
    status = os.stat(path)
    identity = (status.st_dev, status.st_ino)
    if identity in parents:
        raise UserError(f"{path} is a link to a folder that holds it; remove it")
    scan.watch(path, status)
    images, folders = _list_folder(path, scan)
    yield folder, images
    for name in folders:
        yield from _walk(root, f"{folder}/{name}", scan, (*parents, identity))


def _list_folder(path: str, scan: Scan) -> tuple[list[str], list[str]]:
    """Return the images and the folders in a folder, both in order."""
    with os.scandir(path) as iterator:
        entries = list(iterator)
    # Comprehensions: this runs for every image, and a loop with branches takes twice as long.
    try:
        folders = {entry.name for entry in entries if entry.is_dir()}
    except OSError:  # a link leads in a circle
        folders = {entry.name for entry in entries if os.path.isdir(entry.path)}
    files = [entry.name for entry in entries if entry.name not in folders]
    images = [name for name in files if name.endswith(_USUAL_EXTENSIONS) or name.lower().endswith(IMG_EXTENSIONS)]
    if len(images) < len(files):
        others = [os.path.join(path, name) for name in set(files) - set(images)]
        dangling = [other for other in others if os.path.islink(other) and not os.path.exists(other)]
        # The link may lead to a disk that is not mounted: its folder could appear later without a change here.
        scan.doubt = scan.doubt or "".join(f"the link {link} has no target" for link in dangling[:1])
    return sorted(images), sorted(folders)
