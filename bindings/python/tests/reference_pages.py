# SPDX-License-Identifier: Apache-2.0
"""reference_pages.py: checks that the pages of reference.py have an entry with the whole docstring for every public
name,
and no broken links. Needs pdoc; DSOPT_LIBRARY names the library."""

import html.parser
import pathlib
import re
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[0:1] = [str(HERE), str(HERE.parent)]
import documented  # noqa: E402

reference = documented.reference()


class Page(html.parser.HTMLParser):
    """The text below each anchor of a page, and the links."""

    def __init__(self, text):
        super().__init__()
        self.text, self.links, self._open = {}, [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.links += [found["href"]] if tag == "a" and "href" in found else []
        if tag in ("section", "div"):
            self._open.append(found.get("id"))
            if found.get("id"):
                self.text[found["id"]] = ""

    def handle_endtag(self, tag):
        if tag in ("section", "div"):
            self._open.pop()

    def handle_data(self, data):
        for name in self._open:
            if name:
                self.text[name] += data


def words(text):
    """Returns only letters and digits, because Markdown marks are not text."""
    return re.findall(r"\w+", text)


class Pages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.modules = reference.public_modules()
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        root = pathlib.Path(cls.folder.name)
        cls.files = {path: (root / path).read_text(encoding="utf-8") for path in reference.write(root)}
        cls.pages = {path: Page(text) for path, text in cls.files.items()}

    def test_writes_one_page_per_module(self):
        expected = {name.replace(".", "/") + ".html" for name in self.modules} | {"index.html"}
        self.assertEqual(set(self.pages), expected)
        self.assertLessEqual({"dsopt.html", "dsopt/jax.html", "dsopt/tf.html", "dsopt/torch.html"}, expected)

    def test_writes_every_name_with_its_whole_docstring(self):
        for name, module in self.modules.items():
            page = self.pages[name.replace(".", "/") + ".html"]
            entries = list(documented.entries(module))
            self.assertGreaterEqual(len(entries), len(module.__all__))
            for entry, _, found in entries:
                with self.subTest("%s.%s" % (name, entry)):
                    self.assertIn(entry, page.text)
                    text = reference.inspect.getdoc(documented.resolve(module, entry)) or ""
                    page_words = iter(words(page.text[entry]))
                    self.assertEqual([word for word in words(text) if word not in page_words], [])  # in this order
                    self.assertEqual([a for a in found if a not in words(page.text[entry])], [])

    def test_describes_fields(self):
        page = self.pages["dsopt.html"]
        for kind in ("Report", "Param", "NormResult"):
            for field in reference.rows_of(reference.inspect.getdoc(getattr(self.modules["dsopt"], kind))):
                self.assertGreater(len(words(page.text["%s.%s" % (kind, field)])), 3, (kind, field))

    def test_writes_no_broken_links(self):
        for path, page in self.pages.items():
            folder = pathlib.PurePosixPath(path).parent
            for link in page.links:
                if re.match(r"\w+:", link):
                    continue
                target, _, anchor = link.partition("#")
                parts = []
                for part in (folder / target).parts if target else (path,):
                    parts = parts[:-1] if part == ".." else parts + [part]
                target = "/".join(parts)
                with self.subTest(path, link=link):
                    self.assertIn(target, self.pages)
                    if anchor:
                        self.assertIn(anchor, self.pages[target].text)

    def test_writes_identical_pages_again(self):
        with tempfile.TemporaryDirectory() as folder:
            reference.write(folder)
            for path, text in self.files.items():
                self.assertEqual(pathlib.Path(folder, path).read_text(encoding="utf-8"), text, path)


if __name__ == "__main__":
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(Pages)
    result = unittest.TextTestRunner(stream=sys.stdout).run(suite)
    # A test with failed subtests counts as one failure.
    failed = len({str(getattr(test, "test_case", test)) for test, _ in result.failures + result.errors})
    print("%d passed, %d failed" % (result.testsRun - failed, failed))
    sys.exit(failed != 0)
