"""Relations: facts that are asked for in other words than they are stated in."""

from typing import NamedTuple


class Relation(NamedTuple):
    """One relation: statements and questions share no word of weight but the subject.

    subjects: kinds of subject it suits, letters of "tpb" (things, places, beings).
    value: a kind of value that `selector_questions.Facts.value` draws.
    """

    subjects: str
    value: str
    statements: tuple[str, ...]
    questions: tuple[str, ...]


# "@name subjects value: statements => questions", fields as in selector_forms
_TEXT = """
@price tp number: Somebody paid {v} dollars for {e}; {e} was bought for {v} dollars; They sold {e}
and got {v} dollars => What is the price of {e}?|The price is; How much does {e} cost?|It costs;
How expensive is {e}?|It is
@age tpb number: {e} is {v} years old; It has been {v} years since {e} came into the world; {e} has
seen {v} summers => What is the age of {e}?|The age is; For how long has {e} existed?|For
@height tp number: {e} is {v} feet tall; The top of {e} is {v} feet above the ground; {e} rises to
{v} feet => What is the height of {e}?|The height is; How high is {e}?|It is
@weight tb number: {e} tips the scales at {v} pounds; Lifting {e} means lifting {v} pounds; {v}
pounds is what the scales showed for {e} => How heavy is {e}?|It is; What does {e} weigh?|It
weighs; What is the weight of {e}?|It is
@owner tp person: {e} belongs to {v}; {v} possesses {e}; {e} is the property of {v} => Who owns
{e}?|The owner is; Who is the owner of {e}?|The owner is; Whose is {e}?|It is that of
@maker tp person: {e} was built by {v}; {v} put {e} together by hand; {e} is the work of {v} => Who
made {e}?|It was made by; Who created {e}?|It was created by
@hue tpb colour: {e} was painted {v}; They saw that {e} was {v} all over; {e} looks {v} in daylight
=> What colour is {e}?|The colour is; What is the hue of {e}?|The hue is
@location tp town: {e} stands in {v}; One can find {e} in {v}; Whoever goes to {v} can see {e} =>
Where is {e}?|It is in; What is the location of {e}?|It is in; In which town is {e} situated?|In
@speed tb number: {e} moves at {v} miles an hour; In one hour {e} covers {v} miles => How fast is
{e}?|It goes at; What is the velocity of {e}?|The velocity is
@name tpb name: {e} is called {v}; People call {e} {v}; {e} answers to {v} => What is the name of
{e}?|The name is; How is {e} named?|It is named
@seller tp person: {v} sold {e} to a stranger; {e} was handed to the buyer by {v} => Who got rid of
{e} for money?|It was; Which person let go of {e} in a deal?|It was
@fire tp year: {e} burned down in {v}; In {v} nothing was left of {e} but ashes => In what year was
{e} destroyed by flames?|It was in; When did {e} go up in smoke?|In
@keeper tp person: {v} watches over {e} at night; {v} has an eye on {e} when everybody sleeps =>
Who keeps {e} safe after dark?|It is; Who guards {e}?|It is guarded by
@sound tb colour: {e} makes a {v} noise; The noise of {e} was described as {v} => What does it
sound like when one hears {e}?|It sounds; How did listeners describe the tone of {e}?|As
@birth b town: {e} was born in {v}; {e} first saw the light of day in {v}; {v} is the native town
of {e} => Where does {e} come from?|From; What is the birthplace of {e}?|It is; Where did the life
of {e} begin?|In
@death b year: {e} died in {v}; {v} was the last year of {e}; They buried {e} in {v} => When did
{e} pass away?|In; In what year did the life of {e} end?|In
@home b town: {e} lives in {v}; {e} has rooms in {v}; {e} has settled down in {v} => What is the
residence of {e}?|It is; Where does {e} reside?|In; Which town is home to {e}?|It is
@trade b good: {e} earns a living by selling {v}; One buys {v} from {e}; {e} keeps a stall with {v}
=> What does {e} deal in?|In; What goods does {e} offer?|They are; What business is {e} in?|It is
@dish b good: {e} loves nothing more than {v}; Nothing pleases {e} like {v}; {e} always asks for
{v} => What is the favourite food of {e}?|It is; What does {e} like best to eat?|It is
@dislike b good: {e} cannot stand {v}; The mere smell of {v} makes {e} leave the room => What does
{e} hate?|It is; What is {e} disgusted by?|By
@spouse b person: {e} is married to {v}; {v} and {e} said yes at the altar; {e} shares bed and
board with {v} => Who is the husband or wife of {e}?|It is; With whom did {e} have a wedding?|With
@fear b good: {e} trembles at the sight of {v}; {v} scare {e} to death => What is {e} afraid
of?|Of; What frightens {e}?|It is
@master b person: {e} takes orders from {v}; {v} tells {e} what to do => Who is the boss of {e}?|It
is; Whom does {e} obey?|It is; For whom does {e} work?|For
@study b person: {v} taught {e} everything; {e} was a pupil of {v} => From whom did {e}
learn?|From; Who educated {e}?|It was; Who was the mentor of {e}?|It was
@savings b number: {e} has put aside {v} dollars; There are {v} dollars under the mattress of {e}
=> How much money does {e} have?|It is; What is the fortune of {e}?|It is
@debt b person: {e} still has to pay {v} back; {v} once lent money to {e} => To whom does {e} owe
something?|To; Who is the creditor of {e}?|It is
@arrival tb time: {e} will be here at {v}; We expect {e} at {v} => When does {e} arrive?|At; What
is the arrival time of {e}?|It is
@leaving tb time: {e} sets off at {v}; At {v} one has to say goodbye to {e} => When does {e}
depart?|At; At what hour will {e} be gone?|At
@hours p time: One may enter {e} from {v} on; The doors of {e} are unlocked at {v} => When does {e}
open?|At; How early can I visit {e}?|At
@closing p time: After {v} nobody is let into {e}; {e} shuts at {v} => How late can one get into
{e}?|Until; What is the closing time of {e}?|It is
@founding p year: The first stone of {e} was laid in {v}; {e} goes back to the year {v} => When was
{e} founded?|In; How far back does the history of {e} reach?|To
@design tp person: {v} drew the plans of {e}; {e} was thought up by {v} => Who designed {e}?|It
was; Who is the architect behind {e}?|It is
@substance t material: {e} was carved out of {v}; {v} was used to fashion {e}; {e} consists of {v}
=> What is {e} made of?|It is made of; Which material is {e}?|It is
@content t good: {e} is full of {v}; Somebody had hidden {v} in {e}; Inside {e} they found {v} =>
What does {e} contain?|It contains; What is the content of {e}?|It is
@discovery tp person: {v} came across {e} by chance; It was {v} who stumbled upon {e} => Who
discovered {e}?|It was; Who found {e}?|It was
@thief t person: {v} made off with {e}; {e} was taken away by {v} without permission => Who stole
{e}?|It was; Who is guilty of the theft of {e}?|It is
@giver t person: {v} left {e} to the family as a keepsake; {e} came as a birthday surprise from {v}
=> Who gave {e}?|It was; From whom was {e} received?|From
@user t person: Only {v} knows how to handle {e}; {e} is in the hands of {v} every day => Who uses
{e}?|It is; Who is able to operate {e}?|It is
@repair tp person: {v} got {e} going again; {e} was brought back into shape by {v} => Who fixed
{e}?|It was; Who repaired {e}?|It was
@damage tp person: {v} smashed {e} to pieces; {e} fell apart because of {v} => Who broke {e}?|It
was; Who is to blame for the destruction of {e}?|It is
@storage t town: {e} lies locked away in {v}; For safety they moved {e} to {v} => Where is {e}
kept?|In; In what place is {e} stored?|In
@origin t town: {e} was shipped over from {v}; A workshop in {v} turned out {e} => Where was {e}
produced?|In; What is the origin of {e}?|It is
@winner t person: {v} came first and took {e} home; After the contest {e} went to {v} => Who won
{e}?|It was; Who was the winner of {e}?|It was
@inhabitant p person: {v} lives in {e}; {v} moved into {e} last spring => Who is the inhabitant of
{e}?|It is; Who occupies {e}?|It is; Who dwells at {e}?|It is
@crowd p number: {v} people live around {e}; One counts {v} heads at {e} => What is the population
of {e}?|It is; How many inhabitants does {e} have?|It has
@road p number: It is {v} miles from here to {e}; After {v} miles on foot one reaches {e} => How
far away is {e}?|It is; What is the distance to {e}?|It is
@season tpb month: {e} is at its best in {v}; Nobody sees {e} except in {v} => What time of the
year suits {e}?|It is; In which month should one look for {e}?|In
@meeting b town: They ran into {e} in {v}; {e} crossed our way in {v} => Where was {e} met?|In; In
what town did the encounter with {e} take place?|In
@travel tb town: {e} is on the way to {v}; {v} is where {e} is heading => What is the destination
of {e}?|It is; Where is {e} going?|To; Where does the journey of {e} lead?|To
@cure b good: {v} brought {e} back on the feet; A spoonful of {v} did away with the fever of {e} =>
What healed {e}?|It was; Which remedy helped {e} to recover?|It was
@language b language: {e} grew up with {v}; At home {e} talks {v} => What is the mother tongue of
{e}?|It is; Which language does {e} speak?|It is
@instrument b music: {e} plays the {v}; On Sundays one hears {e} at the {v} => Which musical
instrument has {e} mastered?|It is; What does {e} make music with?|With
@children b small: {e} has brought up {v} sons and daughters; {v} youngsters call {e} their parent
=> How many children does {e} have?|It is; What is the number of offspring of {e}?|It is
@parts tp small: {e} was put together from {v} pieces; One can take {e} apart into {v} bits => Of
how many parts does {e} consist?|Of; How many components has {e}?|It has
@rescue b person: {v} pulled {e} out of the water; Without {v} it would have been over with {e} =>
Who saved {e}?|It was; To whom does {e} owe survival?|To
@rival b person: {e} competes with {v} in everything; {v} and {e} have never got along => Who is
the rival of {e}?|It is; Against whom does {e} struggle?|Against
@helper b person: {v} lends {e} a hand every morning; {e} could do nothing without {v} => Who
assists {e}?|It is; Whose support does {e} rely on?|That of
@crime b town: The police caught {e} in {v}; {e} was put in handcuffs in {v} => Where was {e}
arrested?|In; In which town did {e} lose freedom?|In
@post b role: {e} serves as {v}; They made {e} {v} of the company => What is the profession of
{e}?|It is; What job does {e} have?|It is; What does {e} do for a living?|The job is
@pay b number: {e} gets {v} dollars a month; Every month {v} dollars go to {e} => What is the
salary of {e}?|It is; How much does {e} earn?|It is
@size t number: From end to end {e} measures {v} inches; {e} takes up {v} inches on the shelf =>
What is the length of {e}?|It is; How long is {e}?|It is
@depth p number: {e} goes down {v} feet; A weight on a line sank {v} feet at {e} => How deep is
{e}?|It is; What is the depth of {e}?|It is
@smell tp good: Around {e} the air is heavy with {v}; One notices {v} when one comes near {e} =>
What does {e} smell of?|Of; Which odour hangs about {e}?|It is
@use tp good: {e} serves to keep {v}; People bring their {v} to {e} => What is the purpose of
{e}?|It is for; What is {e} good for?|For
"""


def _relations(text: str) -> dict[str, Relation]:
    found = {}
    for entry in " ".join(text.split()).split("@")[1:]:
        head, _, body = entry.partition(": ")
        name, subjects, value = head.split()
        statements, questions = body.split(" => ")
        found[name] = Relation(
            subjects, value, tuple(statements.split("; ")), tuple(questions.strip().split("; "))
        )
    return found


RELATIONS = _relations(_TEXT)
