"""Pictures that any viewer opens, whatever the labels are."""

from xml.etree import ElementTree

from unwall.svg import Picture

SVG = "{http://www.w3.org/2000/svg}"


def test_labels_are_shown_as_they_are():
    label = 'layer<0> & "norm"'
    picture = Picture(200, 100, title=label)
    picture.box(1, 2, 30, 40, "red", hover=label)
    picture.text(1, 2, label, anchor="end", bold=True)
    root = ElementTree.fromstring(str(picture))
    assert [element.text for element in root.iter() if element.text and element.text.strip()] == [label] * 3


def test_elements_lie_where_they_were_put():
    picture = Picture(200)
    picture.box(1.5, 2, 30, 40, "red")
    picture.line(0, 1, 2, 3)
    picture.curve([(0, 1), (2.25, 3)], "blue", dashed=True)
    picture.dot(7, 8, "green")
    picture.height = 60
    root = ElementTree.fromstring(str(picture))
    assert root.attrib["viewBox"] == "0 0 200 60"
    ground, box = root.findall(f"{SVG}rect")
    assert (ground.attrib["width"], ground.attrib["height"]) == ("200", "60")
    assert [box.attrib[name] for name in ("x", "y", "width", "height")] == ["1.5", "2", "30", "40"]
    assert [root.find(f"{SVG}line").attrib[name] for name in ("x1", "y1", "x2", "y2")] == ["0", "1", "2", "3"]
    assert root.find(f"{SVG}polyline").attrib["points"] == "0,1 2.25,3"
    assert (root.find(f"{SVG}circle").attrib["cx"], root.find(f"{SVG}circle").attrib["cy"]) == ("7", "8")
