"""Members of an archive and their groups, kept as numbers."""

from __future__ import annotations

from datapipe.sources.tar_members import Groups, Member, Members


def member(name: str, offset: int) -> Member:
    return Member(name=name, offset=offset, offset_data=offset + 512, size=7)


def test_members_come_back_as_they_were_added() -> None:
    members = Members()
    added = [member("ä/1.jpg", 0), member("ä/1.txt", 1024), member("2.jpg", 2048)]
    for each in added:
        members.add(each)
    assert [members[at] for at in range(len(members))] == added and members.name(1) == "ä/1.txt"
    members.drop_last()
    members.add(member("3.jpg", 4096))
    assert len(members) == 3 and members[2] == member("3.jpg", 4096)


def test_groups_stand_in_the_order_of_their_first_members() -> None:
    members = Members()
    for at, name in enumerate(("b.jpg", "__n__/x.jpg", "a.jpg", "b.txt", ".c.jpg", "a.txt", "a.json")):
        members.add(member(name, 1024 * at))
    groups = Groups(members, lambda name: (name.partition(".")[0], name.partition(".")[2]))
    found = [(key, [field for field, _ in group.members], group.num_runs) for key, group in groups]
    assert found == [("b", ["jpg", "txt"], 2), ("a", ["jpg", "txt", "json"], 2)] and len(groups) == 2
    assert list(Groups(Members(), lambda name: (name, ""))) == []
